//! The operations on pages of a dense cache, as data: a step's begin, and copies of pages.
//!
//! In a dense model each query row of attention reads all tokens before it, or a window of them. Their keys and values
//! are in *pages* of device memory, which move whole. A page holds `page_tokens` tokens of every layer of a *group*:
//! layers with one row format, one kind of attention, and so one page table. Attention finds a sequence's pages by a
//! row of that table. Page 0 of each group is the *null page*: it belongs to no sequence, and entries without a page
//! name it.
//!
//! Such a cache needs no attached pools on the device. An operation carries all that it needs: addresses, sizes, and a
//! descriptor of words. [`Device::enqueue_pages`](crate::device::Device::enqueue_pages) takes it.
//!
//! **A step's begin** ([`BeginPages`]) is the only operation of a step. The host keeps each sequence's page table in
//! pinned words. The begin copies the entries that changed to tensors at fixed addresses, which captured graphs of
//! attention read, and computes the other tensors of the step from the lengths: see the fields. The device computes
//! them, because only it knows a length whose accepted rows are in a tensor.
//!
//! **What is trusted.** Slices and sizes are checked when an operation is enqueued, for all devices alike (`checks`).
//! The words of a descriptor, and all that they lead to, are read when the operation runs. A word that does not fit
//! reaches nothing: it becomes the sticky error of the step's [`Report`], and the row writes no tensor outside of its
//! place. What the host must keep: one step names a lane once. Otherwise the lane's length is that of any of the rows.
//!
//! **The rule of a begin.** Let `rows` be the descriptor's batch rows. Errors name the row; those of a group name it as
//! their layer.
//! 1. More rows than the batch has are an error ([`Cause::Tables`], value: the rows), and the step has none.
//! 2. A row whose lane does not exist ([`Cause::Tables`], value: the lane) counts as one without tokens and query rows.
//! 3. A row's committed length is that of its entry, if the host knows it. Otherwise it is the lane's length and the
//!    accepted count, from the entry or the tensor. More accepted than landed rows are an error ([`Cause::Accepted`],
//!    value: the count), and count as none accepted.
//! 4. A row whose committed tokens and query rows are more than an i32 holds ([`Cause::Tables`], value: the query rows)
//!    counts as one without tokens and query rows.
//! 5. Query rows follow each other over all batch rows. Those at or beyond `step_tokens` do not exist; each row that
//!    lacks some is an error ([`Cause::Tables`], value: its query rows).
//! 6. The lane's words become (committed length, query rows).
//! 7. Changed entries beyond the table ([`Cause::Tables`], value: the first) are an error, and none of that group's are
//!    copied. An entry that names no page of the group ([`Cause::Tables`], value: the entry) becomes the null page.
//! 8. A query row at position `p` goes to page `table[p / page_tokens]`. If the table ends before it, or the page is
//!    the null page or none of the group, that is an error ([`Cause::Tables`], value: `p`), and its slot is -1.
//!
//! [`Report`]: crate::device::descriptor::Report
//! [`Cause::Tables`]: crate::device::descriptor::Cause::Tables
//! [`Cause::Accepted`]: crate::device::descriptor::Cause::Accepted

mod checks;
pub mod descriptor;
mod kept;

use crate::device::Slice;

pub(super) use checks::{StepPages, StepTables, begin, check};
#[cfg(feature = "cuda")]
pub(super) use kept::Run;
pub(super) use kept::{Kept, merged, runs};

/// The most groups of a dense cache.
pub const PAGE_GROUPS_MAX: usize = 4;

/// An operation on pages. It runs in its stream's order.
#[derive(Clone, Copy, Debug)]
pub enum PageOp<'a> {
    /// Begins a step: commits the rows that its lanes' last steps landed, and fills the tensors that attention reads.
    Begin(BeginPages<'a>),
    /// Copies pages: to host memory, from it, or inside the device. A stream that is being captured rejects it
    /// ([`Kind::InvalidState`](crate::Kind::InvalidState)): each launch would copy the pages of this call.
    Copy(CopyPages<'a>),
}

impl PageOp<'_> {
    /// The operation's name in errors and timelines.
    pub const fn name(&self) -> &'static str {
        match self {
            PageOp::Begin(_) => "begin pages",
            PageOp::Copy(_) => "copy pages",
        }
    }
}

/// The memory of one piece of every page: page `p` begins at byte `p * stride` of it and has `bytes` bytes. The stride,
/// the bytes and the memory's address are multiples of 4.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plane {
    /// The memory, on the device or on the host. It may end with the last page's bytes.
    pub memory: Slice,
    /// The distance of two pages in bytes, at least `bytes`.
    pub stride: u64,
    /// Bytes of a page's piece.
    pub bytes: u64,
}

/// Copies of pages: see [`PageOp::Copy`]. Its pieces may be copied in any order, so no piece is written that another
/// one reads or writes.
#[derive(Clone, Copy, Debug)]
pub struct CopyPages<'a> {
    /// For each piece of a page, the plane to copy from and the plane to copy to, with equal bytes.
    pub planes: &'a [(Plane, Plane)],
    /// The pages to copy from and to. Pages that follow each other on both sides, in this order, are copied together.
    pub pages: &'a [(u32, u32)],
}

/// The beginning of a step: see [`PageOp::Begin`]. No slice that it writes overlaps another one.
///
/// The slices' sizes give the numbers: `batch` rows by `lengths`, at most 32767; `step_tokens` query rows of all batch
/// rows by `positions`, at most 2^31 - 1; and the lanes by `lanes`. None is 0.
#[derive(Clone, Copy, Debug)]
pub struct BeginPages<'a> {
    /// The pinned words of the step: see [`descriptor`].
    pub descriptor: Slice,
    /// `[lanes][2]` u32 on the device: the committed length, and the rows that the last step landed. It reads and
    /// writes those of the step's lanes.
    pub lanes: Slice,
    /// `[batch]` u32 on the device: accepted counts. The device reads a row's count where its entry is
    /// [`ACCEPTED_ON_DEVICE`](crate::device::descriptor::ACCEPTED_ON_DEVICE).
    pub accepted: Option<Slice>,
    /// `[batch]` i32 that it writes: the tokens that attention of the row's last query row sees, itself included; 0
    /// beyond the step's rows. vLLM's `seq_lens`.
    pub lengths: Slice,
    /// `[batch + 1]` i32 that it writes: the query rows before each row, and all of them from the step's rows on.
    /// vLLM's `query_start_loc`.
    pub starts: Slice,
    /// `[step_tokens]` that it writes: the position of each query row in its sequence; 0 beyond the step's.
    pub positions: Slice,
    /// Whether positions and slots are i64; otherwise they are i32.
    pub wide: bool,
    /// The tables of each group, 1 to [`PAGE_GROUPS_MAX`].
    pub groups: &'a [PageTables],
    /// The pinned [`Report`](crate::device::descriptor::Report) of 0 layers that it writes. Its lengths are the rows'
    /// committed lengths.
    pub report: Slice,
}

/// The page tables of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageTables {
    /// `[lanes][columns]` i32, pinned: each lane's pages in the order of its tokens, 0 for none.
    pub lanes: Slice,
    /// `[batch][columns]` i32 that it writes: of each row the entries that the descriptor names, from the words of its
    /// lane. Others stay as they are. At most 2^28 entries. vLLM's `block_table`.
    pub table: Slice,
    /// `[step_tokens]` i32 or i64 that it writes: the slot `page * page_tokens + position % page_tokens` of each query
    /// row; -1 beyond the step's. It finds the page in `table`. vLLM's `slot_mapping`.
    pub slots: Slice,
    /// Tokens of a page, at least 1.
    pub page_tokens: u32,
    /// Pages of the group, the null page included. Tables name pages below it.
    pub pages: u32,
}
