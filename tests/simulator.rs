//! The simulator on the built-in setup.
#![allow(missing_docs)]
