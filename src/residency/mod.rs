//! The rule.
