//! Choice tables: which overlap each layer takes, from counters some steps old.
