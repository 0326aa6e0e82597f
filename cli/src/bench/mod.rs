//! `forebay bench`: what a device reaches of its ceilings, with every outcome compared with the rule's.

pub mod result;
pub mod step;
