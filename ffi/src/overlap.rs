//! Overlapped layers: the engine's work by a callback, in an order that hides the gather.
