//! Statistics as plain numbers. A snapshot costs a copy and needs no synchronisation with the device.

/// The statistics of a cache. A gauge is a current value; a counter only grows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stats {
    /// Gauge: sequences that are open, or closed with work in flight that names them.
    pub sequences: u32,
    /// Gauge: steps between prepare and retire.
    pub steps_in_flight: u32,
    /// Gauge: free pages of the total pool, without [`Stats::unused_pages`].
    pub free_host_pages: u32,
    /// Gauge: free pages of index keys.
    pub free_index_pages: u32,
    /// Gauge: published pages (of rows and of index keys) that no sequence uses. Admission can take them in addition to
    /// the free pages, except pages that a fork or a copy in flight still owns.
    pub unused_pages: u32,
    /// Gauge: free slots of the layer with the fewest; with [`Config::share`](crate::Config::share), slots that can
    /// still be promised.
    pub free_slots: u32,
    /// Gauge: slots that belong to a sequence, of all layers, in whole blocks of 64.
    pub slots_in_use: u64,
    /// Gauge: free lanes.
    pub free_lanes: u32,
    /// Gauge: parked sequences.
    pub parked: u32,
    /// Gauge: arriving sequences, of at most [`Config::arriving`](crate::Config::arriving). One that has ended counts
    /// until its work has ended.
    pub arriving: u32,
    /// Gauge: pages (of rows and of index keys) that are withheld after an abort
    /// ([`Cache::abort`](crate::Cache::abort)).
    pub withheld_pages: u32,
    /// Counter: steps retired.
    pub steps: u64,
    /// Counter: distinct selected rows that were resident, in all layers.
    pub hits: u64,
    /// Counter: rows fetched, in all layers.
    pub misses: u64,
    /// Counter: misses in scratch slots.
    pub scratch: u64,
    /// Counter: bytes of missed rows, host to device.
    pub bytes_up: u64,
    /// Counter: resizes of a sequence's budgets.
    pub resizes: u64,
    /// Counter: rows that resizes have moved to other slots, in all layers, as far as a retired step has reported them.
    pub moved_rows: u64,
    /// Counter: prompt tokens looked up for prefix sharing.
    pub prompt_tokens: u64,
    /// Counter: prompt tokens found in shared pages.
    pub shared_tokens: u64,
    /// Counter: published pages.
    pub published_pages: u64,
    /// Counter: published pages that were evicted to make room.
    pub evicted_pages: u64,
}
