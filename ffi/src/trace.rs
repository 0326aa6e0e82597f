//! Selection and request traces: writing and reading.
