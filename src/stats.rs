//! Counters as plain numbers: a snapshot costs a copy and needs no synchronisation with a device.

/// What a cache has and does. Gauges describe now, counters only grow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stats {
    /// Gauge: sequences that are open, or closed while work that names them is in flight.
    pub sequences: u32,
    /// Gauge: steps between prepare and retire.
    pub steps_in_flight: u32,
    /// Gauge: free pages of the total pool; [`Stats::unused_pages`] are not among them.
    pub free_host_pages: u32,
    /// Gauge: free pages of index keys.
    pub free_index_pages: u32,
    /// Gauge: shared pages, of rows and of index keys, that no sequence uses: what admission can take beside
    /// the free ones, but for pages that a fork or a copy in flight still owns.
    pub unused_pages: u32,
    /// Gauge: free slots of the layer that has the fewest.
    pub free_slots: u32,
    /// Gauge: free lanes.
    pub free_lanes: u32,
    /// Counter: steps retired.
    pub steps: u64,
    /// Counter: distinct selected rows that were resident, all layers.
    pub hits: u64,
    /// Counter: rows fetched, all layers.
    pub misses: u64,
    /// Counter: of these, rows in scratch slots.
    pub scratch: u64,
    /// Counter: bytes of rows that misses asked for, host to device.
    pub bytes_up: u64,
    /// Counter: prompt tokens that were looked up for sharing.
    pub prompt_tokens: u64,
    /// Counter: of these, tokens in pages that were taken over.
    pub shared_tokens: u64,
    /// Counter: pages that were published for others to find.
    pub published_pages: u64,
    /// Counter: of these, pages that went to make room.
    pub evicted_pages: u64,
}
