//! The pictures of the documentation: each file is what its source draws, has a text that describes it, and is shown on
//! a page. The numbers in two of them are the library's. `cli/tests/figures.rs` tests how they look in a browser.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use forebay::device::Device;
use forebay::device::host::{HostDevice, HostOptions};
use forebay::residency::{Fetch, LayerTables, Portable, QueryRange, Selected, TableShape, Workspace};
use forebay::{
    Accepted, BatchRow, BringUp, Budget, Buffers, Cache, Config, Layer, LayerCall, Memory, MicroBatch, Open,
};
use forebay::{Shape, Slots, WarmUp};

#[path = "support/skip.rs"]
mod skip;

const IMAGES: &str = "docs/images";

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn picture(name: &str) -> String {
    fs::read_to_string(root().join(IMAGES).join(name)).unwrap()
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let mut files: Vec<PathBuf> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files
}

/// Runs Python from the root. Returns whether it succeeded, and its errors; none if there is no Python, and the test
/// reports its skip.
fn python(arguments: &[&str]) -> Option<(bool, String)> {
    let Ok(run) = Command::new("python3").arg("-B").args(arguments).current_dir(root()).output() else {
        skip::skip("python3");
        return None;
    };
    Some((run.status.success(), String::from_utf8(run.stderr).unwrap()))
}

/// Draws the pictures again and compares. Returns whether those in `folder` are the same, and the output.
fn compared(folder: &Path) -> Option<(bool, String)> {
    python(&["ci/figures", "--check", "--to", folder.to_str().unwrap()])
}

#[test]
fn every_picture_equals_the_output_of_its_source() {
    let Some((same, said)) = compared(&root().join(IMAGES)) else { return };
    assert!(same, "{said}");
}

#[test]
fn control_a_picture_that_was_changed_added_or_lost_is_reported() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("figures");
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).unwrap();
    let drawn =
        files(&root().join(IMAGES)).into_iter().filter(|path| path.extension().is_some_and(|e| e == "svg"));
    drawn.for_each(|path| _ = fs::copy(&path, folder.join(path.file_name().unwrap())).unwrap());
    let reports = |name: &str| {
        let (same, said) = compared(&folder)?;
        assert!(!same && said.contains(name) && said.contains("make figures"), "{name}: {said}");
        Some(())
    };
    let Some((same, said)) = compared(&folder) else { return };
    assert!(same, "{said}");
    fs::write(folder.join("rule.svg"), picture("rule.svg").replace(">5<", ">4<")).unwrap();
    reports("rule.svg").unwrap();
    fs::remove_file(folder.join("rule.svg")).unwrap();
    reports("rule.svg").unwrap();
    fs::write(folder.join("rule.svg"), picture("rule.svg")).unwrap();
    fs::write(folder.join("other.svg"), "<svg/>").unwrap();
    reports("other.svg").unwrap();
}

#[test]
fn control_shapes_that_overlap_or_leave_the_picture_are_not_drawn() {
    for (drawing, said) in [
        ("f.label('box', 10, 10, 60, 20, ['fits'])", ""),
        ("f.label('box', 10, 10, 40, 20, ['too wide'])", "'too wide' is wider than its box"),
        ("f.text('', 10, 30, 'over'); f.text('', 12, 30, 'lying')", "'over' and 'lying' overlap"),
        ("f.text('', 190, 30, 'outside')", "'outside' leaves the picture"),
        ("f.text('', 20, 30, 'words'); f.arrow([(30, 10), (30, 60)])", "a line goes through 'words'"),
    ] {
        let head = "import sys; sys.path.insert(0, 'ci/figures'); from draw import Figure";
        let script = format!("{head}; f = Figure('f', (200, 100), 't', 'd'); {drawing}; f.finish()");
        let Some((drawn, errors)) = python(&["-c", &script]) else { return };
        assert!(drawn == said.is_empty() && errors.contains(said), "{drawing}: {errors}");
    }
}

/// The text of an element of the picture, without markup.
fn element(text: &str, name: &str) -> Option<String> {
    let (_, rest) = text.split_once(&format!("<{name} "))?;
    let (_, rest) = rest.split_once('>')?;
    Some(rest.split_once(&format!("</{name}>"))?.0.to_owned())
}

/// The missing parts of a picture's words for screen readers.
fn unsaid(text: &str) -> Vec<&'static str> {
    let shorter =
        |name: &str, least: usize| element(text, name).is_none_or(|words| words.trim().len() < least);
    let mut missing = Vec::new();
    missing.extend(shorter("title", 10).then_some("a title"));
    missing.extend(shorter("desc", 80).then_some("a description"));
    missing.extend((!text.contains("role=\"img\"")).then_some("its role"));
    missing.extend((!text.contains("aria-labelledby=\"title description\"")).then_some("what names it"));
    missing
}

#[test]
fn every_picture_has_a_title_and_a_description() {
    for file in files(&root().join(IMAGES)).iter().filter(|file| file.extension().is_some_and(|e| e == "svg"))
    {
        assert_eq!(unsaid(&fs::read_to_string(file).unwrap()), Vec::<&str>::new(), "{}", file.display());
    }
    let silent = picture("page.svg")
        .replace("<title ", "<g ")
        .replace("<desc id=\"description\">", "<desc id=\"d\"></desc>");
    assert_eq!(unsaid(&silent), ["a title", "a description"]);
}

/// Whether a page shows the picture, with words for readers who do not see it.
fn shows(page: &str, picture: &str) -> bool {
    page.split("![").skip(1).any(|rest| {
        let shown = rest.split_once("](").and_then(|(words, rest)| Some((words, rest.split_once(')')?.0)));
        shown.is_some_and(|(words, target)| {
            words.len() >= 20 && target.ends_with(&format!("images/{picture}"))
        })
    })
}

#[test]
fn every_picture_is_shown_on_a_page() {
    let docs = files(&root().join("docs")).into_iter().chain([root().join("README.md")]);
    let pages: Vec<String> = docs
        .filter(|file| file.extension().is_some_and(|e| e == "md"))
        .map(|f| fs::read_to_string(f).unwrap())
        .collect();
    for file in files(&root().join(IMAGES)) {
        let name = file.file_name().unwrap().to_str().unwrap();
        assert!(pages.iter().any(|page| shows(page, name)), "no page shows {name}");
    }
    assert!(shows("a\n![what is to be seen in it\non two lines](docs/images/a.svg) b", "a.svg"));
    assert!(!shows("![](docs/images/a.svg) [what is to be seen](docs/images/a.svg)", "a.svg"));
}

/// The texts of the attribute `data-cell` that begin with `what`, and each element's own text.
fn cells<'a>(text: &'a str, what: &str) -> Vec<(&'a str, &'a str)> {
    let cells = text.split("data-cell=\"").skip(1).filter(|rest| rest.starts_with(what));
    cells.map(|rest| (rest.split('"').next().unwrap(), rest.split(['>', '<']).nth(1).unwrap())).collect()
}

/// The sources of the cache, in one text.
fn cache_sources() -> String {
    files(&root().join("src/cache")).iter().map(|file| fs::read_to_string(file).unwrap()).collect()
}

/// The variants of `enum State` in the sources of the cache, in lower case.
fn states(sources: &str) -> BTreeSet<String> {
    let (_, rest) = sources.split_once("enum State {").unwrap();
    let names = rest.split_once('}').unwrap().0.split(',').filter_map(|line| line.split_whitespace().last());
    names.map(str::to_lowercase).collect()
}

/// The lists of states with a name, such as `const PROMPTS: [State; 2] = [State::A, State::B];`.
fn lists(sources: &str) -> Vec<(&str, &str)> {
    let named = |rest: &&str| rest.split(':').nth(1).is_some_and(|kind| kind.starts_with(" [State; "));
    let lists = sources.split("const ").skip(1).filter(named);
    lists.map(|rest| (rest.split(':').next().unwrap(), rest.split(['[', ']']).nth(3).unwrap())).collect()
}

/// The states in which the cache accepts each call: `check_state(&[State::A, State::B], "call")`, or with the name of a
/// list, `check_state(&State::PROMPTS, "call")`.
fn accepted(sources: &str) -> BTreeSet<(String, String)> {
    let mut accepted = BTreeSet::new();
    let lists = lists(sources);
    let calls = sources.split("check_state(&").skip(1);
    for rest in calls.filter(|rest| rest.starts_with(['[', 'S'])) {
        let (list, rest) = match rest.strip_prefix('[') {
            Some(rest) => rest.split_once(']').unwrap(),
            None => {
                let (name, rest) = rest.split_once(',').unwrap();
                let name = name.strip_prefix("State::").unwrap();
                (lists.iter().find(|(own, _)| *own == name).unwrap().1, rest)
            }
        };
        let call = rest.split('"').nth(1).unwrap();
        // Without states it is no call, but a refusal.
        for state in list.split(',').filter(|state| !state.is_empty()) {
            accepted.insert((state.trim().strip_prefix("State::").unwrap().to_lowercase(), call.to_owned()));
        }
    }
    accepted
}

/// What the picture of a sequence's states does not share with the sources of the cache.
fn moves_that_differ(picture: &str, sources: &str) -> Vec<String> {
    let known = states(sources);
    let boxes = picture.split("class=\"name m\" data-cell=\"state\"").skip(1);
    let drawn: BTreeSet<String> =
        boxes.map(|rest| rest.split(['>', '<']).nth(1).unwrap().to_owned()).collect();
    let mut differ: Vec<String> = known.symmetric_difference(&drawn).cloned().collect();
    // A close, the end of the last work and a failed step move a sequence on without a check of its state.
    let (mut from, mut to) =
        (BTreeSet::new(), BTreeSet::from(["free", "closing", "failed"].map(str::to_owned)));
    for (cell, label) in cells(picture, "move ") {
        let [_, before, call, after] = cell.split(' ').collect::<Vec<_>>()[..] else { panic!("{cell}") };
        // A label names its call, or says what the call came to.
        if !label.contains(call) && !["nothing left", "again"].contains(&label) {
            differ.push(format!("{label} for {call}"));
        }
        from.insert((before.to_owned(), call.to_owned()));
        to.insert(after.to_owned());
    }
    // An opening finds a free record. `publish` moves pages and not the sequence, and so do index keys.
    let mut accepted = accepted(sources);
    accepted.extend(["open", "arrive"].map(|call| ("free".to_owned(), call.to_owned())));
    accepted.remove(&("running".to_owned(), "publish".to_owned()));
    accepted.retain(|(_, call)| call != "place_index_keys");
    // A truncation of a prompt branches off before the check of states.
    let prompts = lists(sources).into_iter().find(|(name, _)| *name == "PROMPTS").unwrap().1;
    let branch = "is_prompt() {\n            self.truncate_prompt(sequence";
    for state in prompts.split(", ").filter(|_| sources.contains(branch)) {
        let state = state.strip_prefix("State::").unwrap().to_lowercase();
        accepted.insert((state, "truncate".to_owned()));
    }
    differ.extend(accepted.symmetric_difference(&from).map(|(state, call)| format!("{call} in {state}")));
    differ.extend(known.symmetric_difference(&to).map(|state| format!("a move to {state}")));
    differ
}

#[test]
fn the_states_of_a_sequence_and_their_calls_are_those_of_the_cache() {
    let (drawn, sources) = (picture("sequence.svg"), cache_sources());
    assert_eq!(moves_that_differ(&drawn, &sources), [""; 0]);
    let other = drawn.replace("data-cell=\"move running fork running\"", "");
    assert_eq!(moves_that_differ(&other, &sources), ["fork in running"]);
    let other = drawn.replace(">joining</text>", ">ready</text>");
    assert_eq!(moves_that_differ(&other, &sources), ["joining", "ready"]);
    let other = drawn.replace(">join_more</text>", ">join_less</text>");
    assert_eq!(moves_that_differ(&other, &sources), ["join_less for join_more"]);
    let other = drawn.replace("move filling join joining", "move filling join running");
    let other = other.replace("move joining join_more joining", "move joining join_more running");
    assert_eq!(moves_that_differ(&other, &sources), ["a move to joining"]);
    let other = sources.replace("check_state(&State::FILLED, \"append\")", "");
    let states = ["arriving", "filling", "parked", "warming"];
    assert_eq!(moves_that_differ(&drawn, &other), states.map(|state| format!("append in {state}")));
    let other = sources.replace("self.truncate_prompt(sequence", "");
    assert_eq!(
        moves_that_differ(&drawn, &other),
        states[..3].iter().map(|s| format!("truncate in {s}")).collect::<Vec<_>>()
    );
}

/// The numbers in the cells `what` of a picture, in their order.
fn shown(text: &str, what: &str) -> Vec<u32> {
    let cell = format!("data-cell=\"{what}\"");
    let cells = text.split(&cell).skip(1);
    cells.map(|rest| rest.split(['>', '<']).nth(1).unwrap().parse().unwrap()).collect()
}

/// A lane of `budget` slots in tables of its own, and the work room of a resolve.
struct Lane {
    tables: LayerTables,
    work: Workspace,
    rows: u32,
}

impl Lane {
    fn new(rows: u32, budget: u32) -> Lane {
        let shape = TableShape {
            lanes: 1,
            tokens: 64,
            query_rows: 1,
            scratch: 8,
            waves: 1,
            scratch_base: 1,
            landing_base: 64,
            budget_base: 128,
            budget_blocks: 1,
        };
        let mut tables = LayerTables::new(shape).unwrap();
        tables.join(0, &[0], budget, rows).unwrap();
        Lane { tables, work: Workspace::new(&shape, 8).unwrap(), rows }
    }

    /// The resident rows, each with its slot.
    fn resident(&self) -> Vec<(u32, u32)> {
        (0..self.rows).filter_map(|row| Some((row, self.tables.slot(0, row)?))).collect()
    }

    /// A step that selects these rows and accepts none. Returns the fetched rows, each with its slot.
    fn step(&mut self, indices: &[u32]) -> Vec<(u32, u32)> {
        self.tables.commit(&Portable, 0, 0, 1, |_| {}).unwrap();
        let selection: Vec<i32> = indices.iter().map(|row| *row as i32).collect();
        let (mut slots, mut fetches) = (vec![-1; selection.len()], vec![Fetch { position: 0, slot: 0 }; 8]);
        let selected = Selected { selection: &selection[..], slots: &mut slots, fetches: &mut fetches };
        let rows = QueryRange { first: 0, count: 1 };
        let output = self.tables.resolve(&Portable, 0, rows, selected, &mut self.work).unwrap();
        assert_eq!((output.beyond, output.counts.scratch), (None, 0));
        self.tables.validate().unwrap();
        fetches[..output.counts.misses as usize].iter().map(|fetch| (fetch.position, fetch.slot)).collect()
    }
}

fn firsts(of: &[(u32, u32)]) -> Vec<u32> {
    of.iter().map(|(row, _)| *row).collect()
}

/// Runs the picture's steps. Returns the differences between picture and rule.
fn differs(picture: &str) -> Vec<String> {
    let mut lane = Lane::new(6, 3);
    lane.step(&shown(picture, "before order"));
    let mut faults = Vec::new();
    let mut compare = |what: String, by_rule: Vec<u32>| {
        let drawn = shown(picture, &what);
        if drawn != by_rule {
            faults.push(format!("{what}: {drawn:?}, by the rule {by_rule:?}"));
        }
    };
    compare("before order".to_owned(), lane.tables.order(0));
    for step in 1..=3 {
        let indices = shown(picture, &format!("{step} indices"));
        let (before, order) = (lane.resident(), lane.tables.order(0));
        let fetched = lane.step(&indices);
        let after = lane.tables.order(0);
        let hits = firsts(&before).into_iter().filter(|row| indices.contains(row)).collect();
        let victims: Vec<u32> = order.into_iter().filter(|row| !after.contains(row)).collect();
        // A missed row takes a victim's slot.
        let slot = |row: &u32| before.iter().find(|(held, _)| held == row).unwrap().1;
        let mut freed: Vec<u32> = victims.iter().map(slot).collect();
        let mut taken: Vec<u32> = fetched.iter().map(|(_, slot)| *slot).collect();
        freed.sort_unstable();
        taken.sort_unstable();
        assert_eq!(freed, taken);
        compare(format!("{step} hits"), hits);
        compare(format!("{step} misses"), firsts(&fetched));
        compare(format!("{step} victims"), victims);
        compare(format!("{step} order"), after);
    }
    faults
}

#[test]
fn the_rule_gives_the_worked_example() {
    let drawn = picture("rule.svg");
    assert_eq!(differs(&drawn), Vec::<String>::new());
    let selected: Vec<u32> = (1..=3).flat_map(|step| shown(&drawn, &format!("{step} indices"))).collect();
    assert!((0..6).all(|row| selected.contains(&row)), "every row has its turn: {selected:?}");
    // The control: the victim of the first step, drawn as another row.
    let (head, rest) = drawn.split_once("data-cell=\"1 victims\"").unwrap();
    let wrong = format!("{head}data-cell=\"1 victims\"{}", rest.replacen(">0<", ">2<", 1));
    assert_eq!(differs(&wrong), ["1 victims: [2], by the rule [0]"]);
}

#[test]
fn the_slot_ids_of_the_slab_are_those_of_a_cache() {
    let drawn = picture("slab.svg");
    let device = HostDevice::new(HostOptions::default());
    let stream = device.stream().unwrap();
    let memory = Memory { huge: false, populate: false, lock: false, node: None };
    let shape = Shape { layers: 2, top_k: 62, ..Shape::DEEPSEEK_V3_2 };
    let slots = Slots::Uniform(4 * 64);
    let config = Config { query_rows: 2, memory, slots, ..Config::new(shape, 2, 128, 64) };
    let mut cache = Cache::new(config, device.clone()).unwrap();
    let open = Open { prompt: 64, promised: 8, budget: Budget::Slots(64), bring_up: BringUp::Nothing };
    let sequence = cache.open(&open).unwrap();
    cache.append_in_place(sequence, 64).unwrap();
    let _ready = cache.join(sequence, stream, WarmUp::default()).unwrap();
    assert_eq!(shown(&drawn, "landing"), [cache.landing_slot(sequence, 0).unwrap()]);

    let (selection, slots) = (device.allocate(2 * 62 * 4).unwrap(), device.allocate(2 * 62 * 4).unwrap());
    let indices: Vec<u8> = std::iter::once(0_i32).chain([-1; 123]).flat_map(i32::to_le_bytes).collect();
    device.write(selection, &indices).unwrap();
    let row = BatchRow { sequence, accepted: Accepted::Rows(0), query_rows: 2 };
    let step = cache.prepare(MicroBatch(0), 2, &[row], None, stream).unwrap();
    let call = LayerCall::whole(Layer(0));
    cache.resolve(&step, call, stream, Buffers { selection, slots, split_indices: None }).unwrap();
    let mut slot = [0; 4];
    device.read(slots.part(0, 4).unwrap(), &mut slot).unwrap();
    let block: Vec<u32> = (0..4).flat_map(|i| shown(&drawn, &format!("block {i}"))).collect();
    let first = u32::from_le_bytes(slot);
    assert_eq!(block, [first, first + 64, first + 128, first + 192]);
    assert_eq!(cache.slab(Layer(1)).unwrap().bytes() / 656, u64::from(first) + 256, "no more blocks");
}
