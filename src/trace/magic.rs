//! The bytes by which the readers tell files apart, and the largest window of a zstd frame that they accept. The names
//! of forebay's own formats are in `header` and in `recording`.

/// The first bytes of a zstd frame.
pub(super) const ZSTD_MAGIC: [u8; 4] = [0x28, 0xB5, 0x2F, 0xFD];

/// The largest window that a frame may require, as a power of two: 128 MiB, the format's recommended limit.
pub(super) const WINDOW_LOG_MAX: u32 = 27;

/// The first bytes of gzip, which some tools write under any name.
pub(super) const GZIP_MAGIC: [u8; 2] = [0x1F, 0x8B];

/// The byte order mark that some programs write before UTF-8; it is skipped.
pub(super) const BYTE_ORDER_MARK: &[u8] = b"\xEF\xBB\xBF";

/// The beginning of Azure's CSV.
pub(super) const AZURE: &[u8] = b"TIMESTAMP,";
