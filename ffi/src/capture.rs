//! Captured steps: what a graph holds, and launching it.
