//! Windows that are filled from safetensors files; and files that are cut off, foreign, of another model, or that
//! shrink while they are read.

use std::fs;
use std::path::PathBuf;

use forebay::Kind;
use forebay::weights::{Files, Group, Plan, Pulls};
use proptest::prelude::*;

use crate::windows::{Folder, Rank, layers, sharding, stamp};
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
