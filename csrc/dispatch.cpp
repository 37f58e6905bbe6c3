#if MH_HAVE_BASELINE
namespace baseline { int lanes(); }
#endif
int mh_lanes() { return baseline::lanes(); }
