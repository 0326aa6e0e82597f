//! Random pairs of sides against the map, and what a wrong plan looks like there.

use proptest::prelude::*;

use crate::map::faults;
use forebay::transfer::{Chunk, Component, LayerPlaces, Place, Plan, Request, Run, Side, Split, Stage};

/// How the places of a stage lie in its planes.
#[derive(Clone, Copy, Debug)]
pub enum Layout {
    /// A plane for each layer and component, tokens before heads (vLLM: NHD).
    Separate,
    /// A plane for each layer, whose rows have all components side by side.
    Rows,
    /// One plane of all layers, in each of which a head has all tokens before the next head (HND).
    Whole,
}

/// What a token has in every layer, by name: heads and bytes of a head.
pub type Tokens = Vec<(String, u32, u64)>;

/// A side whose layers have the components that `layers` says. `reversed` lists components in the other order.
pub fn side(
    tokens: &Tokens,
    stages: &[Vec<(u32, Vec<usize>)>],
    (width, split, replicas, page_tokens): (u32, Split, u32, u32),
    (layout, padding, reversed): (Layout, u64, bool),
) -> Side {
    let order: Vec<usize> =
        if reversed { (0..tokens.len()).rev().collect() } else { (0..tokens.len()).collect() };
    let component = |index: &usize| {
        let (name, heads, head_bytes) = tokens[*index].clone();
        Component { name, dtype: "bf16".to_owned(), heads, head_bytes }
    };
    let components: Vec<Component> = order.iter().map(component).collect();
    let own = |heads: u32| match split {
        Split::Heads => u64::from((heads / width).max(1)),
        Split::Tokens => u64::from(heads),
    };
    let planes_to = |page_bytes: &mut Vec<u64>, plane: usize, bytes: u64| {
        page_bytes.resize(page_bytes.len().max(plane + 1), 0);
        page_bytes[plane] = page_bytes[plane].max(bytes);
        plane as u32
    };
    let page = u64::from(page_tokens);
    let places = |(at, (layer, has)): (usize, &(u32, Vec<usize>)), whole: &mut u64, pages: &mut Vec<u64>| {
        let mut row = padding;
        let all: u64 =
            has.iter().map(|index| own(tokens[*index].1) * tokens[*index].2 + padding).sum::<u64>() + padding;
        let mut of = Vec::new();
        for (number, index) in has.iter().enumerate() {
            let (_, heads, bytes) = &tokens[*index];
            let component = order.iter().position(|own| own == index).unwrap() as u32;
            of.push(match layout {
                Layout::Separate => {
                    let token_stride = own(*heads) * bytes + padding;
                    let plane = planes_to(pages, at * tokens.len() + number, page * token_stride);
                    Place { component, plane, offset: 0, token_stride, head_stride: *bytes }
                }
                Layout::Rows => {
                    let (plane, offset) = (planes_to(pages, at, page * all), row);
                    row += own(*heads) * bytes + padding;
                    Place { component, plane, offset, token_stride: all, head_stride: *bytes }
                }
                Layout::Whole => {
                    let (offset, head_stride) = (*whole + padding, page * bytes + padding);
                    *whole = offset + own(*heads) * head_stride;
                    let plane = planes_to(pages, 0, *whole);
                    Place { component, plane, offset, token_stride: *bytes, head_stride }
                }
            });
        }
        LayerPlaces { layer: *layer, places: of }
    };
    let stage = |stage: &Vec<(u32, Vec<usize>)>| {
        let (mut whole, mut page_bytes) = (0, Vec::new());
        let layers =
            stage.iter().enumerate().map(|layer| places(layer, &mut whole, &mut page_bytes)).collect();
        Stage { layers, page_bytes }
    };
    Side { components, stages: stages.iter().map(stage).collect(), width, split, replicas, page_tokens }
}

/// A random pair of sides and a request.
#[derive(Clone, Debug)]
pub struct Case {
    tokens: Tokens,
    /// The sender's layers with their components, and which of both the receiver keeps.
    layers: Vec<(u32, Vec<usize>, u8)>,
    cuts: [usize; 2],
    ends: [(u32, bool, u32, u32, Layout, u64, bool); 2],
    pub replicas: [u32; 2],
    pub count: u32,
    /// Of each chunk: its tokens, those before and behind it in its batch.
    chunks: Vec<(u32, u32, u32)>,
    pub from: u32,
    pub cut: u32,
}

fn layout() -> impl Strategy<Value = Layout> {
    prop_oneof![Just(Layout::Separate), Just(Layout::Rows), Just(Layout::Whole)]
}

fn end() -> impl Strategy<Value = (u32, bool, u32, u32, Layout, u64, bool)> {
    let width = prop_oneof![Just(1_u32), Just(2), Just(4), Just(8)];
    let page = prop_oneof![Just(1_u32), Just(16), Just(32), 2_u32..40];
    (width, any::<bool>(), 1_u32..3, page, layout(), prop_oneof![Just(0_u64), 1_u64..5], any::<bool>())
}

pub fn case() -> impl Strategy<Value = Case> {
    let heads = prop_oneof![Just(1_u32), Just(2), Just(8)];
    let tokens = prop::collection::vec((heads, 1_u64..9), 1..4);
    let layers = prop::collection::vec((1_u32..3, 1_u8..8, any::<u8>()), 1..4);
    let chunks = prop::collection::vec((1_u32..40, 0_u32..50, 0_u32..50), 1..4);
    let numbers = (any::<[u8; 2]>(), any::<[u8; 2]>(), any::<[u8; 2]>());
    (tokens, layers, [end(), end()], chunks, numbers).prop_map(|(tokens, layers, ends, chunks, numbers)| {
        let tokens: Tokens = tokens
            .into_iter()
            .enumerate()
            .map(|(index, (heads, bytes))| (format!("c{index}"), heads, bytes))
            .collect();
        let mut number = 0;
        let layers = layers
            .into_iter()
            .map(|(step, has, keeps)| {
                number += step;
                let has: Vec<usize> = (0..tokens.len()).filter(|index| has & 1 << index != 0).collect();
                (number, if has.is_empty() { vec![0] } else { has }, keeps)
            })
            .collect::<Vec<_>>();
        let count = chunks.iter().map(|chunk| chunk.0).sum::<u32>();
        let (cuts, replicas, [from, cut]) = numbers;
        let from = u32::from(from) % count;
        Case {
            cuts: cuts.map(|cut| usize::from(cut) % (layers.len() + 1)),
            replicas: [0, 1].map(|side| u32::from(replicas[side]) % ends[side].2),
            cut: from + u32::from(cut) % (count - from + 1),
            tokens,
            layers,
            ends,
            count,
            chunks,
            from,
        }
    })
}

impl Case {
    pub fn sides(&self) -> [Side; 2] {
        let all: Vec<_> = self.layers.iter().map(|(layer, has, _)| (*layer, has.clone())).collect();
        // The receiver keeps some layers, and of them some components.
        let kept: Vec<_> = self
            .layers
            .iter()
            .filter(|(_, _, keeps)| keeps & 128 != 0)
            .map(|(layer, has, keeps)| {
                let kept: Vec<usize> = has.iter().copied().filter(|index| keeps & 1 << index != 0).collect();
                (*layer, if kept.is_empty() { has.clone() } else { kept })
            })
            .collect();
        let made = |side: usize, layers: &[(u32, Vec<usize>)]| {
            let (width, tokens, replicas, page, layout, padding, reversed) = self.ends[side];
            let split = if tokens && side == 0 { Split::Tokens } else { Split::Heads };
            let (first, second) = layers.split_at(self.cuts[side].min(layers.len()));
            // Stages need not have the layers in their order.
            let mut stages = [first.to_vec(), second.to_vec()];
            if reversed {
                stages.reverse();
            }
            side_of(&self.tokens, &stages, (width, split, replicas, page), (layout, padding, reversed))
        };
        [made(0, &all), made(1, &kept)]
    }

    pub fn chunks(&self, source: &Side) -> Vec<Chunk> {
        if source.split == Split::Heads {
            return Vec::new();
        }
        let mut first = 0;
        let chunk = |(count, before, behind): &(u32, u32, u32)| {
            let slice = (before + count + behind).div_ceil(source.width);
            let chunk = Chunk { first, at: *before, slice };
            first += count;
            chunk
        };
        let chunks: Vec<Chunk> = self.chunks.iter().map(chunk).collect();
        // Those whose tokens the receiver has are not known to the sender any more.
        let known = chunks.iter().rposition(|chunk| chunk.first <= self.from).unwrap_or(0);
        chunks[known..].to_vec()
    }
}

use side as side_of;

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(400) })]
    #[test]
    fn every_byte_arrives_once(case in case()) {
        let [source, target] = case.sides();
        let chunks = case.chunks(&source);
        let request = Request { tokens: case.count, replicas: case.replicas, chunks: &chunks };
        let found = faults([&source, &target], &request, (case.from, case.cut), |_| ()).unwrap();
        prop_assert_eq!(found, None);
    }
}

/// A plan with one mistake: a token too far, a head too far, a run left out, a run twice, a rank's neighbour.
#[test]
fn control_the_map_finds_a_plan_with_one_mistake() {
    let tokens: Tokens = vec![("k".to_owned(), 4, 6), ("index".to_owned(), 1, 3)];
    let layers = vec![(0, vec![0, 1]), (1, vec![0])];
    let source =
        side(&tokens, std::slice::from_ref(&layers), (2, Split::Tokens, 1, 16), (Layout::Rows, 2, false));
    let target = side(&tokens, &[layers], (2, Split::Heads, 1, 24), (Layout::Whole, 0, true));
    let chunks = [Chunk { first: 0, at: 5, slice: 31 }, Chunk { first: 50, at: 0, slice: 10 }];
    let request = Request { tokens: 70, replicas: [0, 0], chunks: &chunks };
    let found = |change: fn(&mut Vec<Run>)| faults([&source, &target], &request, (0, 70), change).unwrap();
    assert_eq!(found(|_| ()), None);
    let mistakes: [fn(&mut Vec<Run>); 7] = [
        |runs| runs[3].from.offset += runs[3].from.stride,
        |runs| runs[3].to.offset += runs[3].to.stride,
        |runs| runs[3].pieces -= 1,
        |runs| runs[3].pieces += 1,
        |runs| runs.truncate(runs.len() - 1),
        |runs| runs.push(runs[0]),
        |runs| runs[3].from.lane ^= 1,
    ];
    for (number, mistake) in mistakes.into_iter().enumerate() {
        assert!(found(mistake).is_some(), "mistake {number}");
    }
}

/// The bytes of a place's page that it takes, each as often as it is taken.
fn taken(place: &Place, (heads, bytes): (u32, u64), page_tokens: u32) -> Vec<u64> {
    let mut taken = Vec::new();
    for token in 0..u64::from(page_tokens) {
        for head in 0..u64::from(heads) {
            let first = place.offset + token * place.token_stride + head * place.head_stride;
            taken.extend(first..first + bytes);
        }
    }
    taken.sort_unstable();
    taken
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(20_000) })]
    /// Two places are accepted if they share no byte. Of one token stride, or in pages of one token, they are accepted
    /// only then.
    #[test]
    fn places_that_share_a_byte_are_refused_and_others_are_not(
        page_tokens in 1_u32..5,
        sizes in [(1_u32..4, 1_u64..4), (1_u32..4, 1_u64..4)],
        places in [(0_u64..24, 1_u64..16, 1_u64..24), (0_u64..24, 1_u64..16, 1_u64..24)],
        same: bool,
    ) {
        let component = |index: usize| {
            let (heads, head_bytes) = sizes[index];
            Component { name: index.to_string(), dtype: String::new(), heads, head_bytes }
        };
        let place = |index: usize| {
            let (offset, token_stride, head_stride) = places[index];
            let token_stride = if same { places[0].1 } else { token_stride };
            Place { component: index as u32, plane: 0, offset, token_stride, head_stride }
        };
        let layers = [0, 1].map(|index| LayerPlaces { layer: index, places: vec![place(index as usize)] });
        let side = Side {
            components: [0, 1].map(component).to_vec(),
            stages: vec![Stage { layers: layers.to_vec(), page_bytes: vec![1000] }],
            width: 1,
            split: Split::Heads,
            replicas: 1,
            page_tokens,
        };
        let [first, second] = [0, 1].map(|index| taken(&place(index), sizes[index], page_tokens));
        let itself = [&first, &second].iter().any(|taken| taken.windows(2).any(|bytes| bytes[0] == bytes[1]));
        let shared = first.iter().any(|byte| second.binary_search(byte).is_ok());
        match Plan::new(&side, &side) {
            Ok(_) => prop_assert!(!itself && !shared),
            Err(error) if error.place() == "two places that share bytes" => prop_assert!(shared),
            Err(error) if error.place() == "interleaved places of different token strides" => {
                prop_assert!(page_tokens > 1 && place(0).token_stride != place(1).token_stride);
            }
            Err(error) => prop_assert_eq!(error.place(), "strides of a place, within which its own bytes overlap"),
        }
    }
}
