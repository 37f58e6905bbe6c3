// The report's data as the page uses it: heads by index (layer by layer), maps decoded when first asked for.

export const data = JSON.parse(document.getElementById("data").textContent);

export const heads = data.layers.flatMap((layer, row) =>
  Array.from({ length: data.model.heads }, (_, head) => ({ layer, head, row, name: `${layer}.${head}` })),
).map((head, index) => ({
  ...head,
  index,
  shown: data.shown[index],
  role: data.roles.find((role) => role.name === data.main[index]) ?? null,
}));

export const views = data.views.map((view) => {
  const cells = view.edges.length - 1;
  // Tokens that bring their own spaces are set side by side, others get one between.
  const glue = view.tokens.some((token) => token.startsWith(" ")) ? "" : " ";
  let numbers = null;
  return {
    ...view,
    cells,
    exact: view.edges.at(-1) === cells && view.type === "float32",
    label: (cell) => view.tokens.slice(view.edges[cell], view.edges[cell + 1]).join(glue).trim(),
    map(head) {
      numbers ??= decode(view);
      const map = numbers.subarray(head * cells * cells, (head + 1) * cells * cells);
      return view.type === "float32" ? map : Float32Array.from(map, (code) => (code > 254 ? NaN : (code / 254) ** 2));
    },
  };
});

function decode({ type, data }) {
  const text = atob(data);
  const bytes = Uint8Array.from(text, (character) => character.charCodeAt(0));
  return type === "float32" ? new Float32Array(bytes.buffer) : bytes;
}
