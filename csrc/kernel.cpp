namespace MH_LEVEL { int lanes() { return MH_LANES; } }
