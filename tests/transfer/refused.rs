//! Sides that do not fit, and requests that are not there: each error names its field.

use forebay::transfer::{Chunk, Component, LayerPlaces, Of, Place, Plan, Request, Side, Split, Stage};
use forebay::{Error, Kind};

fn good() -> Side {
    let component = |name: &str, heads, head_bytes| Component {
        name: name.to_owned(),
        dtype: "bf16".to_owned(),
        heads,
        head_bytes,
    };
    let place = |component, offset, token_stride| Place {
        component,
        plane: 0,
        offset,
        token_stride,
        head_stride: 16,
    };
    let stage = |layer| Stage {
        layers: vec![LayerPlaces { layer, places: vec![place(0, 0, 80), place(1, 64, 80)] }],
        page_bytes: vec![16 * 80],
    };
    Side {
        components: vec![component("k", 4, 16), component("index", 1, 12)],
        stages: vec![stage(0), stage(1)],
        width: 1,
        split: Split::Heads,
        replicas: 2,
        page_tokens: 16,
    }
}

fn refused(source: &Side, target: &Side) -> Error {
    Plan::new(source, target).unwrap_err()
}

type Change = fn(&mut Side);

#[test]
fn a_side_that_is_wrong_in_itself_is_refused_by_its_field() {
    let changes: [(Change, &str); 22] = [
        (|side| side.page_tokens = 0, "page_tokens"),
        (|side| side.page_tokens = 65_537, "page_tokens"),
        (|side| side.width = 0, "replicas, stages and width"),
        (|side| side.replicas = u32::MAX, "replicas, stages and width"),
        (|side| side.stages.clear(), "replicas, stages and width"),
        (|side| side.width = 3, "heads that the ranks of a stage cannot divide"),
        (|side| side.components[0].heads = 0, "heads and head_bytes of a component"),
        (|side| side.components[0].heads = 5000, "heads and head_bytes of a component"),
        (|side| side.components[0].head_bytes = 0, "heads and head_bytes of a component"),
        (|side| side.components[1].name = "k".to_owned(), "a component's name twice"),
        (|side| side.components[1].name = "k".repeat(65), "a name of a component that is too long"),
        (|side| side.components[1].dtype = "k".repeat(65), "a name of a component that is too long"),
        (|side| side.components = vec![side.components[0].clone(); 65], "components"),
        (|side| side.stages[1].layers[0].layer = 0, "a layer twice"),
        (|side| side.stages[0].layers[0].places[0].component = 1, "a component of a layer twice"),
        (|side| side.stages[0].layers[0].places[1].component = 2, "component of a place"),
        (|side| side.stages[0].layers[0].places[1].plane = 1, "plane of a place"),
        (|side| side.stages[0].layers[0].places[1].offset = 69, "a place beyond its page"),
        (|side| side.stages[0].layers[0].places[0].token_stride = u64::MAX, "a place beyond its page"),
        (|side| side.stages[0].layers[0].places[1].offset = 63, "two places that share bytes"),
        (
            |side| side.stages[0].layers[0].places[0].head_stride = 15,
            "strides of a place, within which its own bytes overlap",
        ),
        (
            |side| side.stages[0].layers[0].places[0].token_stride = 63,
            "strides of a place, within which its own bytes overlap",
        ),
    ];
    Plan::new(&good(), &good()).unwrap();
    for (change, place) in changes {
        let mut side = good();
        change(&mut side);
        for error in [refused(&side, &good()), refused(&good(), &side)] {
            assert_eq!((error.kind(), error.place()), (Kind::InvalidConfig, place), "{error}");
        }
    }
}

/// Rows whose components are interleaved head by head, with all tokens of a head together: no byte is shared.
#[test]
fn interleaved_heads_are_accepted_and_a_byte_too_far_is_not() {
    let mut side = good();
    side.components[1] = Component { name: "v".to_owned(), heads: 4, ..side.components[0].clone() };
    for stage in &mut side.stages {
        stage.page_bytes = vec![4 * 16 * 32];
        for (place, offset) in stage.layers[0].places.iter_mut().zip([0, 16]) {
            (place.offset, place.token_stride, place.head_stride) = (offset, 32, 16 * 32);
        }
    }
    Plan::new(&side, &side).unwrap();
    side.stages[1].layers[0].places[1].offset = 15;
    assert_eq!(refused(&side, &side).place(), "two places that share bytes");
    // Of other strides nothing is proven.
    let places = &mut side.stages[1].layers[0].places;
    (places[1].offset, places[1].token_stride) = (16, 16);
    assert_eq!(refused(&side, &side).place(), "interleaved places of different token strides");
}

#[test]
fn sides_that_do_not_agree_are_refused_and_nothing_is_converted() {
    let changes: [(Change, &str); 6] = [
        (|side| side.components[0].dtype = "fp8_e4m3".to_owned(), "the type of a component"),
        (|side| side.components[0].name = "v".to_owned(), "a component that the sender does not have"),
        (|side| side.components[0].heads = 2, "heads of a component"),
        (|side| side.components[0].head_bytes = 8, "bytes of a component"),
        (|side| side.stages[1].layers[0].layer = 7, "a layer that the sender does not have"),
        (
            |side| side.stages[1].layers[0].places.truncate(1),
            "a component of a layer that the sender does not have",
        ),
    ];
    for (change, place) in changes {
        let mut source = good();
        change(&mut source);
        let error = refused(&source, &good());
        assert_eq!((error.kind(), error.place()), (Kind::InvalidConfig, place), "{error}");
        assert!(
            place.contains("layer") == error.number("layer").is_some() || error.number("component").is_some()
        );
    }
    let divided = Side { split: Split::Tokens, ..good() };
    assert_eq!(refused(&good(), &divided).kind(), Kind::Unsupported);
    Plan::new(&divided, &good()).unwrap();
}

/// What a malicious side may say costs a bounded time, over all stages together.
#[test]
fn places_that_are_interleaved_too_finely_are_refused() {
    let component =
        |index: u32| Component { name: index.to_string(), dtype: String::new(), heads: 64, head_bytes: 1 };
    let place = |component: u32| Place {
        component,
        plane: 0,
        offset: component.into(),
        token_stride: 64 * 64,
        // Of two head strides every pair of heads is compared.
        head_stride: if component.is_multiple_of(2) { 16 } else { 32 },
    };
    let stage = |layer| Stage {
        layers: vec![LayerPlaces { layer, places: (0..16).map(place).collect() }],
        page_bytes: vec![1 << 20],
    };
    let with = |stages: u32| Side {
        components: (0..16).map(component).collect(),
        stages: (0..stages).map(stage).collect(),
        ..good()
    };
    Plan::new(&with(2), &with(2)).unwrap();
    let error = refused(&with(20), &with(2));
    assert_eq!(error.place(), "places that are interleaved too finely to be checked");
}

#[test]
fn requests_that_are_not_there_are_refused() {
    let visit = |plan: &Plan, request: &Request<'_>, layer, tokens| {
        let error = plan.runs(request, (layer, tokens), Of::All, |_| Ok(())).unwrap_err();
        assert_eq!(error.kind(), Kind::OutOfRange);
        error.place().to_owned()
    };
    let whole = Plan::new(&good(), &good()).unwrap();
    let divided = Plan::new(&Side { split: Split::Tokens, ..good() }, &good()).unwrap();
    let request = Request { tokens: 40, replicas: [0, 1], chunks: &[] };
    assert_eq!(visit(&whole, &request, 2, 0..40), "layer");
    assert_eq!(visit(&whole, &request, 0, 0..41), "tokens");
    assert_eq!(visit(&whole, &Request { replicas: [0, 2], ..request }, 0, 0..40), "replica");
    assert_eq!(visit(&whole, &Request { replicas: [2, 0], ..request }, 0, 0..40), "replica");
    let chunk = |first, at, slice| Chunk { first, at, slice };
    let chunks = [chunk(0, 0, 40)];
    assert_eq!(
        visit(&whole, &Request { chunks: &chunks, ..request }, 0, 0..40),
        "chunks of a sender that does not divide tokens"
    );
    assert_eq!(visit(&divided, &request, 0, 0..40), "chunks that do not cover the tokens");
    let late = [chunk(1, 0, 40)];
    assert_eq!(
        visit(&divided, &Request { chunks: &late, ..request }, 0, 0..40),
        "chunks that do not cover the tokens"
    );
    divided.runs(&Request { chunks: &late, ..request }, (0, 1..40), Of::All, |_| Ok(())).unwrap();
    let wrong: [&[Chunk]; 6] = [
        &[chunk(0, 0, 39)],
        &[chunk(0, 1, 40)],
        &[chunk(0, u32::MAX, 40)],
        &[chunk(0, 0, 40), chunk(0, 0, 40)],
        &[chunk(0, 0, 40), chunk(41, 0, 40)],
        &[chunk(0, 0, 40), chunk(40, 0, 40)],
    ];
    for chunks in wrong {
        assert_eq!(visit(&divided, &Request { chunks, ..request }, 0, 0..40), "chunk", "{chunks:?}");
    }
    for of in [Of::Sender(2, 0), Of::Sender(0, 1), Of::Receiver(2, 0), Of::Receiver(0, 1)] {
        let error = whole.runs(&request, (0, 0..40), of, |_| Ok(())).unwrap_err();
        assert_eq!((error.kind(), error.place()), (Kind::OutOfRange, "a rank that is not there"), "{of:?}");
    }
    // The visitor's error ends the visit.
    let mut runs = 0;
    let error = whole.runs(&request, (0, 0..40), Of::All, |_| {
        runs += 1;
        Err(Error::new(Kind::Exhausted, "test"))
    });
    assert_eq!((error.unwrap_err().kind(), runs), (Kind::Exhausted, 1));
}
