//! What a cache will fit and what it will buy, before anybody buys memory.

pub mod plan;
