//! Measured speeds of a machine: the link between host and device, kernel launches, copy engines.
//!
//! This module holds numbers only. A bench or `doctor` measures them, a setup file states them, and the clock device
//! charges by them. Two speeds of the same link are kept apart, because they differ by up to a factor of two: plain
//! copies by a copy engine, and many small rows that a kernel reads over the link.
//!
//! The presets are for planning without the machine. Each states the source of its numbers, and marks a number that
//! is scaled from another link's.

use crate::error::{Error, Kind, Result};

/// The default number of thread blocks of a gather: just enough to fill the link. 35 GB/s over a round trip of 1.5 to
/// 2 us means 52 to 70 KB in flight, and a block of 512 threads has 32 KiB in flight. So two or three blocks suffice,
/// and one more covers a block that waits for its slowest load. Further blocks would queue at the link and delay
/// every other read.
pub const GATHER_BLOCKS: u32 = 4;

/// The speed of moving `rows` rows in one call.
#[derive(Clone, Copy, Debug, PartialEq)]
#[cfg_attr(feature = "predict", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "predict", serde(deny_unknown_fields))]
pub struct RowRate {
    /// The number of rows in the call.
    pub rows: u32,
    /// Row bytes per second.
    pub bytes_per_s: f64,
}

/// The speed of moving rows of one size, by the number of rows in the call.
#[derive(Clone, Debug, PartialEq)]
#[cfg_attr(feature = "predict", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "predict", serde(deny_unknown_fields))]
pub struct RowRates {
    /// Bytes of a row.
    pub row_bytes: u32,
    /// The measured points, by ascending rows; at least one.
    pub points: Vec<RowRate>,
}

/// The largest allowed ratio of the speed between the last two points to the speed of the last point.
const STEEPEST: f64 = 64.0;

impl RowRates {
    /// The same speed for any number of rows of any size.
    pub fn flat(row_bytes: u32, bytes_per_s: f64) -> RowRates {
        RowRates { row_bytes, points: vec![RowRate { rows: 1, bytes_per_s }] }
    }

    /// Nanoseconds for `rows` rows of `row_bytes` bytes. Between two points the time is interpolated; below the first
    /// and above the last, their speed holds. Rows of another size move at the same bytes per second.
    pub fn ns(&self, rows: f64, row_bytes: u32) -> f64 {
        let time = |rows: f64, rate: &RowRate| rows * f64::from(row_bytes) / rate.bytes_per_s * 1e9;
        let above = self.points.partition_point(|point| f64::from(point.rows) <= rows);
        let low = above.checked_sub(1).and_then(|low| self.points.get(low));
        match (low, self.points.get(above)) {
            (Some(low), Some(high)) => {
                let (a, b) = (f64::from(low.rows), f64::from(high.rows));
                let share = (rows - a) / (b - a);
                time(a, low) * (1.0 - share) + time(b, high) * share
            }
            (Some(only), None) | (None, Some(only)) => time(rows, only),
            (None, None) => 0.0,
        }
    }

    /// A line through the points: the fixed nanoseconds and the bytes per second. The speed is the one between the
    /// last two points, and the fixed time is the rest of the last point's time. With a single point the fixed time
    /// is 0.
    pub fn line(&self) -> (f64, f64) {
        let time = |point: &RowRate| self.ns(f64::from(point.rows), self.row_bytes);
        let bytes = |point: &RowRate| f64::from(point.rows) * f64::from(self.row_bytes);
        match self.points.as_slice() {
            [.., a, b] if time(b) > time(a) => {
                let rate = (bytes(b) - bytes(a)) / (time(b) - time(a)) * 1e9;
                // A speed that falls with more rows gives no positive fixed time; the last point's speed is used.
                match time(b) - bytes(b) / rate * 1e9 {
                    fixed if fixed > 0.0 => (fixed, rate),
                    _ => (0.0, b.bytes_per_s),
                }
            }
            [.., b] => (0.0, b.bytes_per_s),
            [] => (0.0, 1.0),
        }
    }

    fn check(&self, place: &'static str) -> Result<()> {
        let ascends = self.points.array_windows().all(|[a, b]| a.rows < b.rows);
        if self.row_bytes == 0 || self.points.is_empty() || !ascends {
            return Err(wrong(format!("{place}: row_bytes is 0, or points are missing or do not ascend")));
        }
        for (i, point) in self.points.iter().enumerate() {
            positive(point.bytes_per_s, || format!("{place}.points[{i}].bytes_per_s"))?;
        }
        // The difference of two nearly equal times would give an arbitrary speed.
        if let [.., a, b] = self.points.as_slice() {
            let time = |point: &RowRate| self.ns(f64::from(point.rows), self.row_bytes);
            let rows = f64::from(b.rows - a.rows) / f64::from(b.rows);
            if (time(b) - time(a)) * STEEPEST < rows * time(b) {
                return Err(wrong(format!(
                    "{place}.points: by the last two, {} more rows take {:.0} ns more of {:.0}; no speed follows",
                    b.rows - a.rows,
                    time(b) - time(a),
                    time(b)
                )));
            }
        }
        Ok(())
    }
}

/// The speeds of one device and its host.
#[derive(Clone, Debug, PartialEq)]
#[cfg_attr(feature = "predict", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "predict", serde(deny_unknown_fields))]
pub struct Rates {
    /// Rows from host to device, by a kernel.
    pub gather: RowRates,
    /// Rows from device to host, by a kernel.
    pub scatter: RowRates,
    /// Plain copies from host to device, bytes per second.
    pub copy_up: f64,
    /// Plain copies from device to host, bytes per second.
    pub copy_down: f64,
    /// Nanoseconds from the end of an operation to the start of a forebay kernel that depends on it.
    pub launch_ns: f64,
    /// The fraction of the device's SMs that a gather takes while it runs, 0 to 1.
    pub gather_sm: f64,
    /// Copy engines.
    pub copy_engines: u32,
}

/// The published peak of PCIe 5.0 x16 in one direction, bytes per second. The presets are scaled by it.
const PCIE_5: f64 = 64e9;

const ROW: u32 = 656;
const GIB: f64 = (1_u64 << 30) as f64;

impl Rates {
    /// The names of the presets.
    pub const PRESETS: [&'static str; 4] = ["pcie4", "pcie5", "pcie6", "c2c"];

    /// A PCIe x16 link with this peak, scaled by the fractions of the peak that were measured on PCIe 5.
    ///
    /// Rows of 656 B: 37 GiB/s up and 43 down (the ESS report, FlashTrans; the axis is in GiB). Plain copies 53 GB/s
    /// up (zartbot/gfd's peak; vLLM #42212 has 51.8) and 52.8 down (NVIDIA/nvbandwidth#24). Assumed: launches 2 us,
    /// 1/16 of the SMs for a gather, two copy engines.
    fn pcie(peak: f64) -> Rates {
        let scale = peak / PCIE_5;
        Rates {
            gather: RowRates::flat(ROW, 37.0 * GIB * scale),
            scatter: RowRates::flat(ROW, 43.0 * GIB * scale),
            copy_up: 53e9 * scale,
            copy_down: 52.8e9 * scale,
            launch_ns: 2000.0,
            gather_sm: 1.0 / 16.0,
            copy_engines: 2,
        }
    }

    /// The rates of a link by name; `None` for an unknown name. "pcie4" and "pcie6" are "pcie5" scaled by the peak
    /// (32, 128 of 64 GB/s: assumed). "c2c" is GB300's NVLink-C2C as measured in sgl-project/sglang#40278: rows of
    /// 512 B 192 GB/s up and 183 down, copy engines 210 and 192. Its launches and SMs are those of PCIe.
    pub fn preset(name: &str) -> Option<Rates> {
        match name {
            "pcie4" => Some(Rates::pcie(32e9)),
            "pcie5" => Some(Rates::pcie(PCIE_5)),
            "pcie6" => Some(Rates::pcie(128e9)),
            "c2c" => Some(Rates {
                gather: RowRates::flat(ROW, 192e9),
                scatter: RowRates::flat(ROW, 183e9),
                copy_up: 210e9,
                copy_down: 192e9,
                ..Rates::pcie(PCIE_5)
            }),
            _ => None,
        }
    }

    /// Checks that every number is finite and in range.
    ///
    /// # Errors
    /// [`Kind::InvalidConfig`] names the field.
    pub fn check(&self) -> Result<()> {
        self.gather.check("gather")?;
        self.scatter.check("scatter")?;
        positive(self.copy_up, || "copy_up".to_owned())?;
        positive(self.copy_down, || "copy_down".to_owned())?;
        if !(0.0..=1e18).contains(&self.launch_ns) {
            return Err(wrong("launch_ns: not a time".to_owned()));
        }
        if !(0.0..=1.0).contains(&self.gather_sm) {
            return Err(wrong("gather_sm: not a share from 0 to 1".to_owned()));
        }
        match self.copy_engines {
            0 => Err(wrong("copy_engines: none".to_owned())),
            _ => Ok(()),
        }
    }
}

/// The host's CPU time to enqueue a step of one micro-batch, in microseconds: forebay's own work and its driver
/// calls. The engine's own launches are not included.
///
/// The default: forebay's own part as measured by `cargo bench --features cuda --bench host` (EPYC, Zen 5: at batch
/// 160, 8 to 10 us from prepare to retire, 0.4 us for a launch, 0.3 to 0.9 us for a layer by its order). The bench
/// counts the driver calls, and their times are assumed: a launch 2 us, a record or a wait 0.25 us (4 million records
/// a second without times, NVIDIA/NVTX#3), any other call 0.1 us.
#[derive(Clone, Copy, Debug, PartialEq)]
#[cfg_attr(feature = "predict", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "predict", serde(deny_unknown_fields))]
pub struct HostCosts {
    /// Prepare, finish and retire for the step: three launches, five records and waits, 18 other calls.
    pub step_us: f64,
    /// Prepare, finish and retire for each batch row.
    pub row_us: f64,
    /// One R, G or S of a layer that is not captured, or one launch of a step's captured layers of all micro-batches:
    /// a kernel or graph launch, and entering and leaving the context.
    pub operation_us: f64,
    /// One edge between streams: a record, a wait, and entering and leaving the context.
    pub edge_us: f64,
}

impl Default for HostCosts {
    fn default() -> Self {
        HostCosts { step_us: 10.45, row_us: 0.055, operation_us: 2.3, edge_us: 0.8 }
    }
}

impl HostCosts {
    /// Checks that every number is a time.
    ///
    /// # Errors
    /// [`Kind::InvalidConfig`] names the field.
    pub fn check(&self) -> Result<()> {
        let times = [
            ("step_us", self.step_us),
            ("row_us", self.row_us),
            ("operation_us", self.operation_us),
            ("edge_us", self.edge_us),
        ];
        match times.into_iter().find(|(_, us)| !(0.0..=1e12).contains(us)) {
            Some((name, _)) => Err(wrong(format!("{name}: not a time"))),
            None => Ok(()),
        }
    }
}

fn wrong(place: String) -> Error {
    Error::new(Kind::InvalidConfig, "rates").at(place)
}

fn positive(value: f64, place: impl Fn() -> String) -> Result<()> {
    // Any real link lies between these bounds.
    match (1.0..=1e18).contains(&value) {
        true => Ok(()),
        false => Err(wrong(format!("{}: not a positive speed", place()))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_is_interpolated_between_points_and_speed_held_outside() {
        let points = vec![RowRate { rows: 10, bytes_per_s: 1e9 }, RowRate { rows: 30, bytes_per_s: 2e9 }];
        let rates = RowRates { row_bytes: 100, points };
        assert_eq!(rates.ns(10.0, 100), 1000.0);
        assert_eq!(rates.ns(30.0, 100), 1500.0);
        assert_eq!(rates.ns(20.0, 100), 1250.0);
        assert_eq!(rates.ns(5.0, 100), 500.0);
        assert_eq!(rates.ns(60.0, 100), 3000.0);
        assert_eq!(rates.ns(0.0, 100), 0.0);
    }

    #[test]
    fn a_line_through_the_last_points_has_a_fixed_time() {
        let rates = |points: &[(u32, f64)]| RowRates {
            row_bytes: 100,
            points: points.iter().map(|(rows, rate)| RowRate { rows: *rows, bytes_per_s: *rate }).collect(),
        };
        // 500 ns and 50 ns per row.
        let (fixed, rate) = rates(&[(1, 1e6), (10, 1e9), (30, 1.5e9)]).line();
        assert!((fixed - 500.0).abs() < 1e-6 && (rate - 2e9).abs() < 1.0, "{fixed} {rate}");
        assert_eq!(rates(&[(7, 3e9)]).line(), (0.0, 3e9));
        assert_eq!(rates(&[(10, 3e9), (20, 2e9)]).line(), (0.0, 2e9));
        assert_eq!(rates(&[(10, 1e9), (20, 4e9)]).line(), (0.0, 4e9));
    }

    #[test]
    fn presets_are_sound_and_a_wrong_number_is_named() {
        for name in Rates::PRESETS {
            Rates::preset(name).unwrap().check().unwrap();
        }
        assert!(Rates::preset("isa").is_none());
        let mut rates = Rates::preset("pcie5").unwrap();
        rates.gather.points[0].bytes_per_s = f64::NAN;
        assert!(rates.check().unwrap_err().to_string().contains("gather.points[0].bytes_per_s"));
        let mut rates = Rates::preset("pcie5").unwrap();
        // 64 and 128 rows in almost the same time, in the same time, and in less time.
        for bytes_per_s in [1.999_999e9, 2e9, 3e9] {
            let point = |rows, bytes_per_s| RowRate { rows, bytes_per_s };
            rates.scatter.points = vec![point(64, 1e9), point(128, bytes_per_s)];
            let text = rates.check().unwrap_err().to_string();
            assert!(text.contains("scatter.points: by the last two"), "{text}");
        }
        rates.scatter.points[1].bytes_per_s = 1.9e9;
        rates.check().unwrap();
        let rates = Rates { gather_sm: 1.5, ..Rates::preset("c2c").unwrap() };
        assert!(rates.check().unwrap_err().to_string().contains("gather_sm"));
    }
}
