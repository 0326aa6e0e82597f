// The kernels of the CUDA device, as one translation unit: what the host device does, word for word.
//
// All of them can be captured, take one argument by value, and check every index that comes from data:
// selections, lanes, counts, pages. Addresses, extents and layers come from the host, which has checked them.
#include "gather.cuh"
#include "newest.cuh"
#include "pages.cuh"
#include "prefetch.cuh"
#include "resize.cuh"
#include "resolve.cuh"
#include "step.cuh"
#include "work.cuh"
