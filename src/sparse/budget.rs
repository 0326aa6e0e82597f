//! Budgets: the number of slots of a sequence in each layer.

use std::ops::Range;

use crate::error::{Error, Kind, Result};

/// The budget of a sequence. It is given when the sequence is opened, and again when it is resized.
#[derive(Clone, Debug, PartialEq)]
pub enum Budget {
    /// A fraction of the prompt and promised tokens, above 0 and at most 1, in every layer: `floor(ratio x tokens +
    /// 0.5)` slots, and at least the cache's `min_budget`.
    Ratio(f64),
    /// The same number of slots in every layer.
    Slots(u32),
    /// A number of slots for each layer.
    ByLayer(Vec<u32>),
}

impl Budget {
    /// The slots of each layer for a sequence of at most `tokens` tokens, prompt plus promised.
    ///
    /// # Errors
    /// [`Kind::InvalidConfig`] for a ratio that is not above 0 and at most 1, for 0 slots, for a table
    /// whose length is not `layers`, and for fewer slots than `least`.
    pub fn slots(&self, tokens: u32, layers: usize, least: u32) -> Result<Vec<u32>> {
        let mut slots = vec![0; layers];
        self.write(tokens, least, &mut slots, |layer| layer..layer + 1)?;
        Ok(slots)
    }

    /// The ratio, if it is one.
    pub(crate) fn ratio(&self) -> Option<f64> {
        if let Budget::Ratio(ratio) = self { Some(*ratio) } else { None }
    }

    /// As [`Budget::slots`], into `slots`: one for each index group, whose layers are `members(group)`. After an error
    /// its contents are unspecified.
    ///
    /// # Errors
    /// As [`Budget::slots`]; [`Kind::InvalidConfig`] for different slots in layers of one group.
    pub(crate) fn write(
        &self,
        tokens: u32,
        least: u32,
        slots: &mut [u32],
        members: impl Fn(usize) -> Range<usize>,
    ) -> Result<()> {
        let bad = |place: &'static str| Error::new(Kind::InvalidConfig, "budget").at(place);
        match self {
            Budget::Ratio(ratio) if *ratio > 0.0 && *ratio <= 1.0 => {
                let rows = (ratio * f64::from(tokens) + 0.5).floor() as u32;
                slots.fill(rows.max(least).max(1));
            }
            Budget::Ratio(_) => {
                return Err(bad("ratio").hint("pass a ratio above 0 and at most 1"));
            }
            Budget::Slots(rows) => slots.fill(*rows),
            Budget::ByLayer(table) => {
                let layers = slots.len().checked_sub(1).map_or(0, |last| members(last).end);
                if table.len() != layers {
                    let (given, wanted) = (table.len() as u64, layers as u64);
                    return Err(bad("layers").with("given", given).with("wanted", wanted));
                }
                for (group, slots) in slots.iter_mut().enumerate() {
                    *slots = one_of(table, members(group)).map_err(|layer| {
                        let error = bad("layers of one index group with different budgets");
                        error.with("layer", layer as u64).hint("their rows are in the same slots")
                    })?;
                }
            }
        }
        match slots.iter().find(|s| **s == 0 || **s < least) {
            Some(few) => {
                let error = bad("slots").with("slots", *few).with("least", least.max(1));
                Err(error.hint("pass at least the cache's min_budget"))
            }
            None => Ok(()),
        }
    }
}

/// The value of a group's layers in a table by layer, or the first layer with another one.
pub(crate) fn one_of(table: &[u32], members: Range<usize>) -> Result<u32, usize> {
    let own = table.get(members.clone()).unwrap_or_default();
    let first = own.first().copied().unwrap_or(0);
    let other = own.iter().position(|value| *value != first);
    other.map_or(Ok(first), |place| Err(members.start + place))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ratio_rounds_to_the_nearest_slot() {
        assert_eq!(Budget::Ratio(0.2).slots(6144, 2, 1).unwrap(), [1229, 1229]);
        assert_eq!(Budget::Ratio(1.0).slots(100, 1, 1).unwrap(), [100]);
        assert_eq!(Budget::Ratio(0.001).slots(10, 1, 1).unwrap(), [1]);
    }

    #[test]
    fn nonsense_is_refused() {
        for ratio in [0.0, -0.1, 7.0, f64::NAN, f64::INFINITY] {
            assert_eq!(Budget::Ratio(ratio).slots(10, 1, 1).unwrap_err().kind(), Kind::InvalidConfig);
        }
        assert!(Budget::Slots(0).slots(10, 1, 0).is_err());
        assert!(Budget::Slots(5).slots(10, 1, 6).is_err());
        assert!(Budget::ByLayer(vec![1, 2]).slots(10, 3, 1).is_err());
        assert_eq!(Budget::ByLayer(vec![9, 7]).slots(10, 2, 7).unwrap(), [9, 7]);
    }

    #[test]
    fn layers_of_a_group_have_one_budget() {
        let members = |group: usize| if group == 0 { 0..1 } else { 1..4 };
        let mut slots = [0; 2];
        let mut write =
            |table: &[u32]| Budget::ByLayer(table.to_vec()).write(10, 1, &mut slots, members).map(|()| slots);
        assert_eq!(write(&[9, 7, 7, 7]).unwrap(), [9, 7]);
        let error = write(&[9, 7, 7, 8]).unwrap_err();
        assert_eq!(error.place(), "layers of one index group with different budgets");
        assert!(error.to_string().contains("layer 3"), "{error}");
        assert_eq!(write(&[9, 7, 7]).unwrap_err().place(), "layers");
    }
}
