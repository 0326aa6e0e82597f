//! The PCIe link of a GPU as the system reports it: what it could be, what it is now, and what its slot provides.
//!
//! An idle link drops to a lower speed, so its speed means something only during or just after a transfer.

use super::finding::{Finding, State};
use crate::input::system_files::Files;

/// A speed and a width.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
struct Lanes {
    /// Generation of PCIe, 1 to 6.
    generation: u32,
    /// Lanes.
    width: u32,
}

impl Lanes {
    /// The values of a folder of the bus, `current` or `max`; none if they are missing or make no sense.
    fn read(files: &Files, folder: &str, which: &str) -> Option<Lanes> {
        let speed = files.word(&format!("{folder}/{which}_link_speed"))?;
        let generation = match speed.split_whitespace().next()? {
            "2.5" => 1,
            "5.0" | "5" => 2,
            "8.0" | "8" => 3,
            "16.0" | "16" => 4,
            "32.0" | "32" => 5,
            "64.0" | "64" => 6,
            _ => return None,
        };
        let width = files.word(&format!("{folder}/{which}_link_width"))?.parse().ok()?;
        // Wider links do not exist: the system writes 63 or 255 for an unknown width.
        (1..=32).contains(&width).then_some(Lanes { generation, width })
    }

    /// The best that both ends support.
    fn least(self, other: Lanes) -> Lanes {
        Lanes { generation: self.generation.min(other.generation), width: self.width.min(other.width) }
    }

    /// Bytes a second in one direction, before packet headers: transfers a second after the generation's line code.
    fn bytes_per_s(self) -> f64 {
        let lane = match self.generation {
            1 => 2.5e9 * 0.8,
            2 => 5e9 * 0.8,
            3 => 8e9 * 128.0 / 130.0,
            4 => 16e9 * 128.0 / 130.0,
            5 => 32e9 * 128.0 / 130.0,
            _ => 64e9 * 242.0 / 256.0,
        };
        lane / 8.0 * f64::from(self.width)
    }
}

impl std::fmt::Display for Lanes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "gen {} x{}", self.generation, self.width)
    }
}

/// A GPU's link; unknown values are none.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub struct Link {
    now: Option<Lanes>,
    most: Option<Lanes>,
    slot: Option<Lanes>,
}

impl Link {
    /// The values of the files now, for the GPU at `bus`.
    pub fn read(files: &Files, bus: &str) -> Link {
        let folder = format!("sys/bus/pci/devices/{bus}");
        Link {
            now: Lanes::read(files, &folder, "current"),
            most: Lanes::read(files, &folder, "max"),
            // The folder is a link into the tree of bridges; its parent is the port that the GPU is plugged into.
            slot: Lanes::read(files, &format!("{folder}/.."), "max"),
        }
    }

    /// The link's present capacity in one direction, bytes a second. None if copies, which reached `copied`, were
    /// faster: then the link is idle again, or copies take another way.
    pub fn peak(&self, copied: Option<f64>) -> Option<f64> {
        self.now.map(Lanes::bytes_per_s).filter(|peak| copied.is_none_or(|copied| copied <= *peak))
    }

    /// The finding for a link over which copies have just reached `copied` bytes a second, or none ran.
    pub fn findings(&self, bus: &str, copied: Option<f64>) -> Vec<Finding> {
        const NAME: &str = "PCIe link";
        let (Some(now), Some(most)) = (self.now, self.most) else {
            return vec![Finding::unknown(NAME, &format!("sys/bus/pci/devices/{bus}/max_link_speed"))];
        };
        let value = format!("{now} now, {most} at most");
        let peak = format!("{:.0} GB/s in one direction", now.bytes_per_s() / 1e9);
        // A speed that the slot does not support is the slot's finding.
        let could = self.slot.map_or(most, |slot| slot.least(most));
        let link = |means: String| Finding::ok(NAME, value, means);
        let link = if now.width < could.width && self.peak(copied).is_some() {
            link(format!("{peak}: it uses fewer lanes than it could")).but(
                State::Warning,
                "reseat the card, or take a slot with all its lanes: see risers and the mainboard's bifurcation",
            )
        } else if now.generation >= could.generation && self.peak(copied).is_some() {
            link(peak)
        } else if self.peak(copied).is_none() {
            link(format!(
                "{peak}, but copies were faster: it is idle again, or copies use another link (NVLink)"
            ))
        } else if copied.is_some() {
            link(format!("{peak}: slower than it could be, though it was just in use")).but(
                State::Warning,
                "check riser, firmware (link speed, ASPM) and lspci -vv for what limits the link",
            )
        } else {
            link("idle links drop to a lower speed".to_owned())
                .but(State::Note, "run without --no-rates, which wakes it")
        };
        let slot = self.slot.filter(|_| could != most).map(|slot| {
            Finding::ok("PCIe slot", format!("{slot} at most"), "the card could do more than its slot")
                .but(State::Warning, "move the card to a slot of its own generation and width")
        });
        [Some(link), slot].into_iter().flatten().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slow_link_is_distinguished_from_an_idle_link_and_from_an_unused_link() {
        let lanes = |generation| Lanes { generation, width: 16 };
        let link = Link { now: Some(lanes(1)), most: Some(lanes(5)), slot: None };
        for (copied, state, text) in [
            (None, State::Note, "drop to a lower speed"),
            (Some(3e9), State::Warning, "just in use"),
            (Some(50e9), State::Ok, "copies were faster"),
        ] {
            let found = link.findings("", copied);
            assert!(
                found.len() == 1 && found[0].state == state && found[0].means.contains(text),
                "{found:?}"
            );
        }
        assert_eq!(
            (link.peak(None), link.peak(Some(3e9)), link.peak(Some(50e9))),
            (Some(4e9), Some(4e9), None)
        );
        // A link that carried more than its reported rate lacks no lanes.
        let narrow = Link { now: Some(Lanes { generation: 5, width: 1 }), ..link };
        assert_eq!(narrow.findings("", Some(50e9))[0].state, State::Ok);
        assert_eq!(narrow.findings("", Some(3e9))[0].state, State::Warning);
    }

    #[test]
    fn a_links_bandwidth_follows_from_its_generation_and_width() {
        for (generation, width, gb) in
            [(1, 16, 4.0), (3, 8, 7.88), (4, 16, 31.5), (5, 16, 63.0), (6, 16, 121.0)]
        {
            let found = Lanes { generation, width }.bytes_per_s() / 1e9;
            assert!((found - gb).abs() < 0.05, "{generation} x{width}: {found}");
        }
    }
}
