//! Stands in for a GPU's driver in tests; never shipped.
//!
//! The member holds its place in the workspace so that lints, tidy rules and directions cover it from
//! the start. What goes here comes with the CUDA device: a header that lets a host compiler run the
//! kernels, and a `libcuda.so.1` whose memory, streams and captures live in this process.
