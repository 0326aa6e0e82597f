//! The planner: what fits, and what it buys.
