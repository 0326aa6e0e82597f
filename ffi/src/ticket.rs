//! Tickets: whether work that the host issued has ended.
