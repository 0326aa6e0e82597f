//! The compiled kernels in the library, and the choice of the image that a device runs.
//!
//! A cubin runs on discrete GPUs of its major version with an equal or higher minor version. Integrated GPUs (8.7,
//! 11.0) are exceptions, so each supported capability is listed by itself. Every other device gets PTX for 8.0, which
//! its driver compiles when the module is loaded; a device older than 8.0 rejects it.
//!
//! `make kernels` builds the files, and `kernels/built/manifest.txt` records the sources and compilers.

/// Bytes aligned for a driver that reads an image by words.
#[repr(C, align(16))]
struct Aligned<T: ?Sized>(T);

static SM_80: &Aligned<[u8]> = &Aligned(*include_bytes!("kernels/built/forebay_sm80.cubin"));
static SM_90: &Aligned<[u8]> = &Aligned(*include_bytes!("kernels/built/forebay_sm90.cubin"));
static SM_100: &Aligned<[u8]> = &Aligned(*include_bytes!("kernels/built/forebay_sm100.cubin"));
static SM_120: &Aligned<[u8]> = &Aligned(*include_bytes!("kernels/built/forebay_sm120.cubin"));

/// The PTX with the final zero byte that the driver needs.
static PTX: &str = concat!(include_str!("kernels/built/forebay.ptx"), "\0");

/// The image for `cuModuleLoadData` on a device of compute capability `capability` (major, minor).
pub(super) fn image(capability: (u32, u32)) -> &'static [u8] {
    match capability {
        (8, 0 | 6 | 9) => &SM_80.0,
        (9, 0) => &SM_90.0,
        (10, 0 | 3) => &SM_100.0,
        (12, 0 | 1) => &SM_120.0,
        _ => PTX.as_bytes(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The capability that the image is compiled for: in a cubin's header flags, or in the PTX text.
    fn target(capability: (u32, u32)) -> String {
        let image = image(capability);
        match image.strip_prefix(b"\x7FELF") {
            Some(_) => {
                assert_eq!(image.as_ptr() as usize % 16, 0, "unaligned");
                // A 64-bit file for machine 190, CUDA. The architecture is in the flags: in their second byte from
                // version 8 of the format on, in the first byte before.
                assert_eq!((image[4], image[18]), (2, 190));
                format!("sm_{}", if image[8] < 8 { image[48] } else { image[49] })
            }
            None => {
                let text = std::ffi::CStr::from_bytes_with_nul(image).unwrap().to_str().unwrap();
                let target = text.lines().find_map(|line| line.strip_prefix(".target "));
                format!("ptx for {}", target.unwrap())
            }
        }
    }

    #[test]
    fn a_device_gets_the_cubin_that_runs_on_it_or_ptx() {
        for (capabilities, wanted) in [
            (&[(8, 0), (8, 6), (8, 9)][..], "sm_80"),
            (&[(9, 0)], "sm_90"),
            (&[(10, 0), (10, 3)], "sm_100"),
            (&[(12, 0), (12, 1)], "sm_120"),
            (&[(7, 5), (8, 7), (9, 1), (10, 1), (11, 0), (13, 0), (0, 0)], "ptx for sm_80"),
        ] {
            for capability in capabilities {
                assert_eq!(target(*capability), wanted, "{capability:?}");
            }
        }
    }
}
