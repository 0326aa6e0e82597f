//! The structs that the driver's calls take by reference, in C layout.

/// The kind of an address whose memory the driver finds by itself (`CU_MEMORYTYPE_UNIFIED`).
pub const MEMORY_UNIFIED: u32 = 4;

/// A memory location.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct Location {
    pub kind: u32,
    pub ordinal: i32,
}

/// The properties of physical memory: the driver's `CUmemAllocationProp`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct Property {
    pub kind: u32,
    pub handles: u32,
    pub location: Location,
    pub unused: [u64; 2],
}

/// Who may use a range: the driver's `CUmemAccessDesc`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct Access {
    pub location: Location,
    pub flags: u32,
}

/// A property of a launch: the driver's `CUlaunchAttribute`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct LaunchAttribute {
    pub id: u32,
    pub unused: u32,
    pub value: [u64; 8],
}

/// A launch's extents: the driver's `CUlaunchConfig`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct LaunchConfig {
    pub grid: [u32; 3],
    pub block: [u32; 3],
    pub shared_bytes: u32,
    pub stream: u64,
    pub attributes: *const LaunchAttribute,
    pub attribute_count: u32,
}

/// An end of a copy in two dimensions.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct CopyEnd {
    pub place: [u64; 2],
    pub kind: u32,
    pub host: u64,
    pub address: u64,
    pub array: u64,
    pub pitch: u64,
}

/// A copy in two dimensions: the driver's `CUDA_MEMCPY2D`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct Copy2d {
    pub from: CopyEnd,
    pub to: CopyEnd,
    pub width: u64,
    pub height: u64,
}

impl Copy2d {
    /// `rows` rows of `bytes` bytes, from the first address to the second, each at its distance of rows.
    pub const fn new(addresses: [u64; 2], strides: [u64; 2], bytes: u64, rows: u64) -> Copy2d {
        const fn end(address: u64, pitch: u64) -> CopyEnd {
            CopyEnd { place: [0; 2], kind: MEMORY_UNIFIED, host: 0, address, array: 0, pitch }
        }
        let (from, to) = (end(addresses[0], strides[0]), end(addresses[1], strides[1]));
        Copy2d { from, to, width: bytes, height: rows }
    }
}

/// The most copies of a batch: three lists of them take 6 KiB of the stack.
pub(super) const BATCH_COPIES: usize = 256;

/// The attributes of copies of a batch: the driver's `CUmemcpyAttributes`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct CopyAttributes {
    pub order: u32,
    pub from: Location,
    pub to: Location,
    pub flags: u32,
}

const _: () = assert!(size_of::<Copy2d>() == 128 && size_of::<CopyAttributes>() == 24);
const _: () = assert!(size_of::<Property>() == 32 && size_of::<Access>() == 12);
const _: () = assert!(size_of::<LaunchAttribute>() == 72 && size_of::<LaunchConfig>() == 56);
