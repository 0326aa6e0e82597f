//! Which ranges of the layers are sharded, and which of the layers.
//!
//! **Ranges** are chosen by name. A pattern is a glob that has to match a whole name: `*` stands for any characters,
//! also dots, so `*.o_proj.weight` is the output projection of every layer. Globs are those of the package `glob`,
//! which matches in bounded time and has no surprises about slashes as it is used here.
//!
//! A choice that does not mean what it says would be found as missing memory much later. So a pattern that matches
//! nothing is an error, a tensor that two patterns match is an error (one of them is wrong, or superfluous), and two
//! ranges of one name in a layer are an error.
//!
//! **Layers.** All layers with a chosen range are *shardable*. Without a budget all of them are sharded, but for the
//! one that an odd number may leave resident (`plan`). With a budget of bytes the fewest layers are, spread evenly over
//! the model, because each pull then has the most time to hide in.

use glob::{MatchOptions, Pattern};

use super::layer::{Tensor, wrong};
use crate::error::{Error, Kind, Result};
use crate::text::echo;

/// Patterns of names.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Patterns(Vec<Pattern>);

impl Patterns {
    /// Patterns from their texts.
    ///
    /// # Errors
    /// [`Kind::InvalidConfig`] names a text that is no pattern, such as `[a`.
    pub fn new<T: AsRef<str>>(texts: &[T]) -> Result<Patterns> {
        let pattern = |text: &T| {
            let text = text.as_ref();
            Pattern::new(text).map_err(|error| {
                Error::new(Kind::InvalidConfig, "plan weights")
                    .at(format!("the pattern {}: {}", echo(text), error.msg))
                    .hint("pass a name in which * stands for any characters")
            })
        };
        texts.iter().map(pattern).collect::<Result<_>>().map(Patterns)
    }

    /// For each layer the indices of the tensors that are chosen, ascending.
    ///
    /// # Errors
    /// [`Kind::InvalidConfig`] for two tensors of one name in a layer, for a tensor that two patterns match, and for a
    /// pattern that matches nothing.
    pub(super) fn choose<T: AsRef<[Tensor]>>(&self, layers: &[T]) -> Result<Vec<Vec<usize>>> {
        let mut used = vec![false; self.0.len()];
        let mut chosen = Vec::with_capacity(layers.len());
        for (layer, tensors) in layers.iter().enumerate() {
            let tensors = tensors.as_ref();
            unique(layer, tensors)?;
            let mut own = Vec::new();
            for (index, tensor) in tensors.iter().enumerate() {
                if let Some(pattern) = self.only(layer, &tensor.name)? {
                    used.iter_mut().skip(pattern).take(1).for_each(|used| *used = true);
                    own.push(index);
                }
            }
            chosen.push(own);
        }
        match self.0.iter().zip(used).find(|(_, used)| !used) {
            Some((pattern, _)) => Err(Error::new(Kind::InvalidConfig, "plan weights")
                .at(format!("the pattern {} matches no tensor of any layer", echo(pattern)))
                .hint("a pattern has to match a whole name; * stands for any characters")),
            None => Ok(chosen),
        }
    }

    /// The index of the pattern that matches the name, if one does.
    fn only(&self, layer: usize, name: &str) -> Result<Option<usize>> {
        let options = MatchOptions::default();
        let mut matching = self.0.iter().enumerate().filter(|(_, own)| own.matches_with(name, options));
        match (matching.next(), matching.next()) {
            (Some((_, one)), Some((_, other))) => {
                let what = format!("two patterns match it, {} and {}", echo(one), echo(other));
                Err(wrong(Kind::InvalidConfig, layer, name, &what).hint("leave one of them out"))
            }
            (first, _) => Ok(first.map(|(index, _)| index)),
        }
    }
}

/// Checks that no two tensors of a layer have the same name.
fn unique(layer: usize, tensors: &[Tensor]) -> Result<()> {
    let mut names: Vec<&str> = tensors.iter().map(|tensor| tensor.name.as_str()).collect();
    names.sort_unstable();
    match names.windows(2).find(|two| two.first() == two.last()) {
        Some(two) => {
            let name = two.first().copied().unwrap_or_default();
            Err(wrong(Kind::InvalidConfig, layer, name, "two tensors of this name")
                .hint("give each tensor of a layer a name of its own"))
        }
        None => Ok(()),
    }
}

/// The ordinals of `sharded` of `layers` shardable layers, spread evenly; `sharded` is even and at most `layers`.
///
/// Their parities alternate, beginning with an even one. So neighbours among them, and the last and the first, have
/// different buffers by their ordinals alone. The i-th is at `i * layers / sharded`, or at the next ordinal if that has
/// the wrong parity. Two steps are at least one ordinal apart, and have different parities, so no two meet; and the
/// last one is below `layers`, because only `sharded == layers` reaches the end, and moves nothing.
pub(super) fn spread(layers: usize, sharded: usize) -> impl Iterator<Item = usize> {
    (0..sharded).map(move |i| {
        let even = i * layers / sharded.max(1);
        even + (even ^ i) % 2
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spread_layers_alternate_in_parity_and_stay_in_range() {
        for layers in 0..70_usize {
            for sharded in (0..=layers).step_by(2) {
                let all: Vec<usize> = spread(layers, sharded).collect();
                assert!(all.is_sorted_by(|a, b| a < b) && all.iter().all(|one| *one < layers), "{all:?}");
                assert!(all.iter().enumerate().all(|(i, one)| i % 2 == one % 2), "{all:?}");
                // Evenly: no gap is more than twice the mean one, and a little.
                let gaps = all.windows(2).map(|two| two[1] - two[0]);
                assert!(gaps.max().unwrap_or(0) <= layers.div_ceil(sharded.max(1)) + 1, "{all:?}");
            }
        }
        assert_eq!(spread(61, 4).collect::<Vec<_>>(), [0, 15, 30, 45]);
    }

    fn layer(names: &[&str]) -> Vec<Tensor> {
        names.iter().map(|name| Tensor { name: (*name).to_owned(), bytes: 1, align: 1 }).collect()
    }

    #[test]
    fn patterns_match_whole_names() {
        let layers = [layer(&["l.0.attn.o_proj.weight", "l.0.mlp.up"]), layer(&["l.1.attn.o_proj.weight"])];
        let choose = |patterns: &[&str]| Patterns::new(patterns)?.choose(&layers);
        assert_eq!(choose(&["*.o_proj.*"]).unwrap(), [vec![0], vec![0]]);
        assert_eq!(choose(&["*.mlp.*", "l.1.*"]).unwrap(), [vec![1], vec![0]]);
        assert_eq!(choose(&["l.?.attn.*"]).unwrap(), [vec![0], vec![0]]);
        assert_eq!(choose(&[]).unwrap(), [vec![0; 0], vec![]]);
        for (patterns, words) in [
            (
                &["o_proj"][..],
                "plan weights: invalid configuration: the pattern o_proj matches no tensor of any layer",
            ),
            (
                &["*.attn.*", "*weight"],
                "layer 0, l.0.attn.o_proj.weight: two patterns match it, *.attn.* and *weight; leave one",
            ),
            (&["[a"], "the pattern [a: invalid range pattern"),
            (&["*.mlp.*", "*.mlq.*"], "*.mlq.* matches no"),
        ] {
            let error = choose(patterns).unwrap_err();
            assert!(error.kind() == Kind::InvalidConfig && error.to_string().contains(words), "{error}");
        }
        let twice = [layer(&["b", "a", "b"])];
        let error = Patterns::new(&["a"]).unwrap().choose(&twice).unwrap_err().to_string();
        assert!(error.contains("layer 0, b: two tensors of this name"), "{error}");
    }
}
