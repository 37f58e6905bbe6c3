#include <nanobind/nanobind.h>
int mh_lanes();
NB_MODULE(_native, m) { m.def("lanes", &mh_lanes); }
