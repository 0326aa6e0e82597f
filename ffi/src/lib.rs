//! The C side of forebay.
