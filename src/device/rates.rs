//! Measured speeds of a machine: its link between host and device, its launches, its copy engines.
//!
//! Plain numbers, no behaviour: a bench or `doctor` measures them, a setup names them, the clock charges
//! them. Two speeds of the same link are kept apart, because they differ by up to two: plain copies, which a
//! copy engine makes, and many small rows, which a kernel reads over the link.
//!
//! The presets are for planning without the machine. Each says where its numbers come from; a number that is
//! scaled from another link's is marked so.

use crate::error::{Error, Kind, Result};

/// Thread blocks of a GPU's gather, unless a device is opened with others: what a link needs and no more. 35 GB/s over
/// a round trip of 1.5 to 2 us are 52 to 70 KB under way, and a block of 512 threads has 32 KiB: two or three blocks,
/// and one while another waits for its slowest load. More of them queue at the link, in front of everyone's reads.
pub const GATHER_BLOCKS: u32 = 4;

/// The speed of moving `rows` rows in one call.
#[derive(Clone, Copy, Debug, PartialEq)]
#[cfg_attr(feature = "predict", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "predict", serde(deny_unknown_fields))]
pub struct RowRate {
    /// Rows of the call.
    pub rows: u32,
    /// Bytes of rows a second.
    pub bytes_per_s: f64,
}

/// The speed of moving rows of one size, by how many there are.
#[derive(Clone, Debug, PartialEq)]
#[cfg_attr(feature = "predict", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "predict", serde(deny_unknown_fields))]
pub struct RowRates {
    /// Bytes of a row.
    pub row_bytes: u32,
    /// By ascending rows; at least one point.
    pub points: Vec<RowRate>,
}

/// So many times the speed of the last point may be that between the last two.
const STEEPEST: f64 = 64.0;

impl RowRates {
    /// The same speed for any number of rows of any size.
    pub fn flat(row_bytes: u32, bytes_per_s: f64) -> RowRates {
        RowRates { row_bytes, points: vec![RowRate { rows: 1, bytes_per_s }] }
    }

    /// Nanoseconds for `rows` rows of `row_bytes` bytes: between two points the time is interpolated, below
    /// the first and above the last their speed holds. Rows of another size go at the same bytes a second.
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

    /// The points as a line: nanoseconds whatever the rows, and bytes a second. The speed is that between the
    /// last two points, the fixed time what the last point takes beyond it; of one point there is none.
    pub fn line(&self) -> (f64, f64) {
        let time = |point: &RowRate| self.ns(f64::from(point.rows), self.row_bytes);
        let bytes = |point: &RowRate| f64::from(point.rows) * f64::from(self.row_bytes);
        match self.points.as_slice() {
            [.., a, b] if time(b) > time(a) => {
                let rate = (bytes(b) - bytes(a)) / (time(b) - time(a)) * 1e9;
                // A speed that falls with the rows has no fixed time: then the last point's is taken.
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
        // Two times that hardly differ make any speed of their difference.
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

/// The speeds of one machine, of one device and its host.
#[derive(Clone, Debug, PartialEq)]
#[cfg_attr(feature = "predict", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "predict", serde(deny_unknown_fields))]
pub struct Rates {
    /// Rows from host to device, by a kernel.
    pub gather: RowRates,
    /// Rows from device to host, by a kernel.
    pub scatter: RowRates,
    /// Plain copies from host to device, bytes a second.
    pub copy_up: f64,
    /// Plain copies from device to host, bytes a second.
    pub copy_down: f64,
    /// From the end of an operation to the beginning of one of forebay's that depends on it, nanoseconds.
    pub launch_ns: f64,
    /// The share of the device's SMs that a gather takes while it runs, 0 to 1.
    pub gather_sm: f64,
    /// Copy engines.
    pub copy_engines: u32,
}

/// PCIe 5.0 x16's published peak in one direction, bytes a second: what the presets are scaled by.
const PCIE_5: f64 = 64e9;

const ROW: u32 = 656;
const GIB: f64 = (1_u64 << 30) as f64;

impl Rates {
    /// The names of the presets.
    pub const PRESETS: [&'static str; 4] = ["pcie4", "pcie5", "pcie6", "c2c"];

    /// PCIe x16 of a peak: the shares of it that were measured on PCIe 5.
    ///
    /// Rows of 656 B: 37 GiB/s up and 43 down (the ESS report, FlashTrans; its bars say GiB). Plain
    /// copies 53 GB/s up (zartbot/gfd's peak; vLLM #42212 has 51.8) and 52.8 down (NVIDIA/nvbandwidth#24).
    /// Assumed: launches 2 us, 1/16 of the SMs for a gather, two copy engines.
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

    /// A link by name: "pcie4" and "pcie6" are "pcie5" scaled by the peak (32, 128 of 64 GB/s: assumed);
    /// "c2c" is GB300's NVLink-C2C by sgl-project/sglang#40278: rows of 512 B 192 GB/s up and 183 down, copy
    /// engines 210 and 192; launches and SMs as for PCIe.
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

    /// Whether every number is one.
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

/// What a core of the host takes to enqueue a step of one micro-batch, in microseconds: forebay's own work, and the
/// driver's calls that it makes. What an engine launches by itself is not in it.
///
/// The default: forebay's own part as `cargo bench --features cuda --bench host` measured it (EPYC, Zen 5: at batch 160
/// 8 to 10 us from prepare to retire, 0.4 us of a launch, 0.3 to 0.9 us of a layer by its order), and of the driver's
/// calls, as that bench counts them, what is assumed: a launch 2 us, a record or a wait 0.25 us (4 million records a
/// second without times, NVIDIA/NVTX#3), any other call 0.1 us.
#[derive(Clone, Copy, Debug, PartialEq)]
#[cfg_attr(feature = "predict", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "predict", serde(deny_unknown_fields))]
pub struct HostCosts {
    /// Prepare, finish and retire: three launches, five records and waits, 18 other calls.
    pub step_us: f64,
    /// A batch row in them.
    pub row_us: f64,
    /// R, G or S of a layer that is not captured, and the launch of a step's captured layers, of all micro-batches at
    /// once: a launch, the context entered and left.
    pub operation_us: f64,
    /// An edge between streams: a record and a wait, the context entered and left.
    pub edge_us: f64,
}

impl Default for HostCosts {
    fn default() -> Self {
        HostCosts { step_us: 10.45, row_us: 0.055, operation_us: 2.3, edge_us: 0.8 }
    }
}

impl HostCosts {
    /// Whether every number is a time.
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
    // A byte a second is slower than any link, and so much is faster.
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
        // 500 ns and 50 ns a row.
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
        // 64 and 128 rows in the same time, but for a hair; and in less.
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
