//! Windows that are filled from safetensors files; and files that are cut off, foreign, of another model, or that
//! shrink while they are read.

use std::fs;
use std::path::PathBuf;

use forebay::Kind;
use forebay::peer::Links;
use forebay::weights::{Border, Files, Group, Outcome, Plan, Pulls};
use proptest::prelude::*;

use crate::windows::{Folder, PATIENCE, Rank, layers, patient, sharding, stamp};
use crate::{devices, grain, no_faults};

/// A safetensors file written by hand: the header's length, the header, the tensors.
fn written(tensors: &[(String, Vec<u8>)]) -> Vec<u8> {
    let (mut entries, mut data) = (vec![r#""__metadata__":{"format":"pt"}"#.to_owned()], Vec::new());
    for (name, bytes) in tensors {
        let (from, to) = (data.len(), data.len() + bytes.len());
        entries.push(format!(
            r#""{name}":{{"dtype":"U8","shape":[{}],"data_offsets":[{from},{to}]}}"#,
            bytes.len()
        ));
        data.extend_from_slice(bytes);
    }
    let header = format!("{{{}}}", entries.join(","));
    [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &data].concat()
}

const LAYERS: usize = 4;

/// The bytes of each tensor: some longer than what is read at once.
fn sizes() -> Vec<Vec<u64>> {
    (0..LAYERS as u64).map(|layer| vec![(4 << 20) + 5000 * (layer + 1), 3 * grain(), 77]).collect()
}

/// All tensors, as a model's files have them: stamps of rank 0 at their places in the window.
fn model() -> Vec<(String, Vec<u8>)> {
    let plan = plan(0, 1);
    let layers = plan.layers().iter();
    let tensors =
        layers.flat_map(|layer| layer.layout.tensors().iter().map(move |tensor| (layer.layer, tensor)));
    tensors
        .map(|(layer, tensor)| {
            let bytes = (tensor.offset..tensor.offset + tensor.bytes).map(|at| stamp(0, layer, at));
            (tensor.name.clone(), bytes.collect())
        })
        .collect()
}

fn plan(rank: u32, ranks: u32) -> Plan {
    Plan::new(&layers(&sizes()), Group { id: 0, rank, ranks }, &sharding(grain())).unwrap()
}

fn new(plan: Plan) -> Rank {
    Rank::new(&devices(1)[0], plan, Pulls::default(), &no_faults()).unwrap()
}

/// The model in two files, the layers interleaved.
fn stored(folder: &Folder) -> [PathBuf; 2] {
    let model = model();
    let [even, odd] = [0, 1].map(|parity| model.iter().skip(parity).step_by(2).cloned().collect::<Vec<_>>());
    [("a", even), ("b", odd)].map(|(name, tensors)| {
        let path = folder.0.join(format!("{name}.safetensors"));
        fs::write(&path, written(&tensors)).unwrap();
        path
    })
}

/// A rank that is alone has the whole model. Two ranks have the same content as when each is filled from buffers with
/// the model's bytes: their parts together are the model.
#[test]
fn files_fill_what_each_rank_owns() {
    let folder = Folder::new();
    let files = Files::open(&stored(&folder)).unwrap();
    let mut rank = new(plan(0, 1));
    rank.windows.fill_from(&files, rank.stream).unwrap();
    rank.layers().iter().for_each(|layer| assert!(rank.is_whole(*layer), "layer {layer}"));
    for number in 0..2 {
        let mut from_files = new(plan(number, 2));
        from_files.windows.fill_from(&files, from_files.stream).unwrap();
        let mut from_buffers = new(plan(number, 2));
        let names = model();
        for layer in 0..LAYERS {
            for (name, bytes) in names.iter().skip(3 * layer).take(3) {
                let buffer = from_buffers.holds(bytes);
                from_buffers.windows.fill(layer, name, buffer, from_buffers.stream).unwrap();
                from_buffers.wait().unwrap();
            }
        }
        let [a, b] = [&mut from_files, &mut from_buffers]
            .map(|rank| rank.windows.hello([0; 32], rank.stream).unwrap().content);
        assert_eq!(a, b);
        // The digest is of this rank's part: a byte of it changes it, a byte of the other's does not.
        let first = &names[0];
        for at in [0, first.1.len() - 1] {
            let mut changed = first.1.clone();
            changed[at] ^= 1;
            let buffer = from_buffers.holds(&changed);
            from_buffers.windows.fill(0, &first.0, buffer, from_buffers.stream).unwrap();
            from_buffers.wait().unwrap();
            let own = (at == 0) == (number == 0);
            let content = from_buffers.windows.hello([0; 32], from_buffers.stream).unwrap().content;
            assert_eq!(content != a, own, "byte {at}, rank {number}");
            let buffer = from_buffers.holds(&first.1);
            from_buffers.windows.fill(0, &first.0, buffer, from_buffers.stream).unwrap();
            from_buffers.wait().unwrap();
        }
    }
}

/// A new version from files: a rank that is alone shows their bytes after the commit, and the old ones before.
#[test]
fn files_fill_a_new_version() {
    let folder = Folder::new();
    let old = Files::open(&stored(&folder)).unwrap();
    let new: Vec<_> =
        model().into_iter().map(|(name, bytes)| (name, bytes.iter().map(|byte| !byte).collect())).collect();
    let path = folder.0.join("new.safetensors");
    fs::write(&path, written(&new)).unwrap();
    let new = Files::open(&[path]).unwrap();
    let mut rank = self::new(plan(0, 1));
    rank.windows.fill_from(&old, rank.stream).unwrap();
    let hello = rank.windows.hello([0; 32], rank.stream).unwrap();
    let mut links = Links::over(Vec::new(), hello, patient(), no_faults()).unwrap();
    rank.windows.share(&mut links, rank.stream, PATIENCE).unwrap();
    let mut update = rank.windows.update(1, &rank.layers(), u64::MAX).unwrap();
    update.fill_from(&new, rank.stream).unwrap();
    update.share(&mut links, rank.stream, PATIENCE).unwrap();
    rank.layers().iter().for_each(|layer| assert!(rank.is_whole(*layer), "layer {layer}"));
    let border = Border { step: 1, stream: rank.stream, at_most: PATIENCE };
    assert_eq!(rank.windows.commit(&mut update, &mut links, border), Ok(Outcome::Committed));
    for layer in rank.layers() {
        rank.windows.pull(layer, rank.stream).unwrap();
        rank.wait().unwrap();
        let shown = rank.read(rank.windows.layer(layer).unwrap());
        let expected = rank.expected(layer);
        let both = shown.iter().zip(&expected);
        assert!(both.clone().count() > 0, "layer {layer}");
        for (shown, byte) in both {
            assert!(byte.is_none_or(|byte| !byte == *shown), "layer {layer}");
        }
    }
}

#[test]
fn files_of_another_model_are_refused_before_anything_is_filled() {
    let folder = Folder::new();
    let [a, b] = stored(&folder);
    let mut rank = new(plan(0, 1));
    let error = rank.windows.fill_from(&Files::open(&[&a]).unwrap(), rank.stream).unwrap_err();
    assert_eq!(error.kind(), Kind::BadFormat);
    assert_eq!(error.place(), "layer 0: model.layers.0.weight.1: none of the files has it");
    let mut longer = model();
    longer[4].1.push(0);
    let path = folder.0.join("longer");
    fs::write(&path, written(&longer)).unwrap();
    let error = rank.windows.fill_from(&Files::open(&[&path]).unwrap(), rank.stream).unwrap_err();
    assert_eq!(error.place(), "layer 1: model.layers.1.weight.1: its bytes in the file");
    assert_eq!((error.number("bytes"), error.number("planned")), (Some(3 * grain() + 1), Some(3 * grain())));
    assert!(rank.windows.layer(0).unwrap_err().place().ends_with("weight.0 was not filled"));
    let error = Files::open(&[&a, &b, &a]).unwrap_err();
    assert!(error.to_string().contains("model.layers.0.weight.0 is in another file too"), "{error}");
    let error = Files::open(&[folder.0.join("none")]).unwrap_err();
    assert!(error.kind() == Kind::Io && error.place().contains("none"), "{error}");
}

/// A file that is cut off after it was opened, as one that is still being written or replaced.
#[test]
fn a_file_that_shrinks_while_it_is_read_is_an_error() {
    let folder = Folder::new();
    let [a, b] = stored(&folder);
    let files = Files::open(&[&a, &b]).unwrap();
    fs::File::options().write(true).open(&b).unwrap().set_len(6000).unwrap();
    let mut rank = new(plan(0, 1));
    let error = rank.windows.fill_from(&files, rank.stream).unwrap_err();
    assert!(error.kind() == Kind::BadFormat && error.place().contains("b.safetensors"), "{error}");
    assert_eq!(rank.windows.layer(3).unwrap_err().kind(), Kind::InvalidState);
}

/// Weights that were filled, and then from files of which one is cut off on the way: the layer that is half of each has
/// no digest, and the layers before it have one of what they hold now.
#[test]
fn a_failed_fill_leaves_no_digest_of_what_was_there() {
    let folder = Folder::new();
    let [a, b] = stored(&folder);
    let files = Files::open(&[&a, &b]).unwrap();
    let mut rank = new(plan(0, 1));
    let ones = vec![1; (4 << 20) + 5000 * LAYERS];
    for layer in plan(0, 1).layers() {
        for tensor in layer.layout.tensors() {
            let from = rank.holds(&ones[..tensor.bytes as usize]);
            rank.windows.fill(layer.layer, &tensor.name, from, rank.stream).unwrap();
        }
    }
    rank.windows.hello([0; 32], rank.stream).unwrap();
    assert!(rank.windows.layer(1).is_ok());
    // The first file has tensors 0 and 2 of even layers and 1 of odd ones; the second one the others. Of layer 1 the
    // second one has the first tensor, whose end lies beyond the first chunk that is read.
    let second = model().iter().skip(1).step_by(2).map(|(_, bytes)| bytes.len() as u64).collect::<Vec<_>>();
    let header = fs::metadata(&b).unwrap().len() - second.iter().sum::<u64>();
    let file = fs::File::options().write(true).open(&b).unwrap();
    file.set_len(header + second[0] + second[1] - 1).unwrap();
    let error = rank.windows.fill_from(&files, rank.stream).unwrap_err();
    assert_eq!(error.kind(), Kind::BadFormat, "{error}");
    assert!(rank.is_whole(0));
    let place = "layer 1: model.layers.1.weight.0 was not filled";
    assert_eq!(rank.windows.layer(1).unwrap_err().place(), place);
    assert_eq!(rank.windows.hello([0; 32], rank.stream).unwrap_err().place(), place);
    // The layers behind it are as they were before.
    let untouched = rank.read(rank.windows.tensor(2, "model.layers.2.weight.1").unwrap());
    assert!(untouched.iter().all(|byte| *byte == 1));
    // From whole files everything is filled again, and the digest is that of a rank that never had anything else.
    let [a, b] = stored(&folder);
    let files = Files::open(&[&a, &b]).unwrap();
    rank.windows.fill_from(&files, rank.stream).unwrap();
    let mut fresh = new(plan(0, 1));
    fresh.windows.fill_from(&files, fresh.stream).unwrap();
    let [a, b] = [&mut rank, &mut fresh].map(|rank| rank.windows.hello([0; 32], rank.stream).unwrap());
    assert_eq!(a, b);
    rank.layers().iter().for_each(|layer| assert!(rank.is_whole(*layer)));
}

/// Bytes that this thread has read from files, where the system counts them.
fn read_by_thread() -> Option<u64> {
    let io = fs::read_to_string("/proc/thread-self/io").ok()?;
    io.lines().find_map(|line| line.strip_prefix("rchar: "))?.parse().ok()
}

/// As many bytes are read as the rank owns; and what lies behind its last one may be gone from the file. Control:
/// without that one it cannot be filled.
#[test]
fn only_the_bytes_that_a_rank_owns_are_read() {
    let folder = Folder::new();
    let model = model();
    let path = folder.0.join("model.safetensors");
    let bytes = written(&model);
    let header = bytes.len() - model.iter().map(|(_, bytes)| bytes.len()).sum::<usize>();
    for own in 0..2 {
        // The last byte of the file that the rank owns: the file is in the order of layers and windows.
        let plan = plan(own, 2);
        let (mut last, mut owns) = (0, 0);
        let mut before = header as u64;
        for layer in plan.layers() {
            let pages = plan.part(layer.layer, own).unwrap();
            let owned = pages.start * grain()..pages.end * grain();
            for tensor in layer.layout.tensors() {
                let end = (tensor.offset + tensor.bytes).min(owned.end);
                let start = tensor.offset.max(owned.start);
                if end > start {
                    last = before + (end - tensor.offset);
                    owns += end - start;
                }
                before += tensor.bytes;
            }
        }
        assert_eq!(before, bytes.len() as u64);
        for (length, whole) in [(last, true), (last - 1, false)] {
            fs::write(&path, &bytes).unwrap();
            let files = Files::open(&[&path]).unwrap();
            fs::File::options().write(true).open(&path).unwrap().set_len(length).unwrap();
            let mut rank = new(plan.clone());
            let before = read_by_thread();
            let filled = rank.windows.fill_from(&files, rank.stream);
            if let (Some(before), Some(after), true) = (before, read_by_thread(), whole) {
                // The count itself is read from a file of a few hundred bytes.
                assert!((owns..owns + 4096).contains(&(after - before)), "{owns}, {}", after - before);
            }
            assert_eq!(filled.map_err(|error| error.kind()).err(), (!whole).then_some(Kind::BadFormat));
        }
        // Rank 0 owns the beginning of the last layer, so much of the file was gone.
        assert!(own == 1 || last + (2 << 20) < bytes.len() as u64, "{last}");
    }
}

proptest! {
    /// Any cut, and any changed byte of the header, is read as the same tensors or refused; nothing panics.
    #[test]
    fn cut_and_changed_files_are_refused(cut in 0..2000_usize, at in 0..300_usize, value in any::<u8>()) {
        let tensors = [("one".to_owned(), vec![1; 500]), ("two".to_owned(), vec![2; 700])];
        let whole = written(&tensors);
        let folder = Folder::new();
        let path = folder.0.join("cut");
        let cut = cut.min(whole.len() - 1);
        fs::write(&path, &whole[..cut]).unwrap();
        prop_assert_eq!(Files::open(&[&path]).unwrap_err().kind(), Kind::BadFormat);
        let mut changed = whole.clone();
        changed[at.min(whole.len() - 1)] = value;
        fs::write(&path, &changed).unwrap();
        if let Err(error) = Files::open(&[&path]) {
            prop_assert!(matches!(error.kind(), Kind::BadFormat), "{error}");
        }
        // A header that claims to be as long as memory.
        let claims = [&u64::MAX.to_le_bytes()[..], &whole[8..]].concat();
        fs::write(&path, &claims).unwrap();
        prop_assert_eq!(Files::open(&[&path]).unwrap_err().kind(), Kind::BadFormat);
    }
}
