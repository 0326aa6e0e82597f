//! What senders, receivers and plans refuse, by field.

use super::*;

#[test]
fn what_cannot_be_is_refused_with_its_field() {
    let (model, planes) = (Model::new(), send_planes());
    let (good, memory, own) = (model.side(), send_memory(&planes), config(FB_TRANSFER_TCP, 1));
    let two = [1_u32, 2];
    let sides = [
        ("component_count", FbTransferSide { component_count: 65, ..good }),
        ("place_count", FbTransferSide { place_count: 1 << 20, ..good }),
        ("plane_count", FbTransferSide { plane_count: u32::MAX, ..good }),
        ("stages", FbTransferSide { stages: u32::MAX, ..good }),
        ("stage_planes", FbTransferSide { stages: 2, ..good }),
        ("fewer planes", FbTransferSide { stages: 2, stage_planes: two.as_ptr(), ..good }),
        ("more planes", FbTransferSide { stage_planes: two[1..].as_ptr(), plane_count: 1, ..good }),
        ("components", FbTransferSide { components: null(), ..good }),
        ("split", FbTransferSide { split: 2, ..good }),
        ("page_tokens", FbTransferSide { page_tokens: 0, ..good }),
    ];
    for (says, side) in sides {
        let (status, text) = make_sender(&own, &side, &memory).unwrap_err();
        assert!(status == FbInvalidConfig && text.contains(says), "{says}: {text}");
    }
    let short = &planes[1..];
    let narrow: Vec<_> = planes.iter().map(|plane| FbSendPlane { page_bytes: 8, ..*plane }).collect();
    let memories = [
        ("plane_count", FbSendMemory { planes: short.as_ptr(), plane_count: short.len() as u32, ..memory }),
        ("page_bytes of a plane", FbSendMemory { planes: narrow.as_ptr(), ..memory }),
        ("reserved", FbSendMemory { reserved: 1, ..memory }),
        ("OVERCOMMIT", FbSendMemory { memory: FB_MEMORY_OVERCOMMIT, ..memory }),
        ("memory", FbSendMemory { memory: 1 << 20, ..memory }),
        ("bytes", FbSendMemory { bytes: 0, ..memory }),
    ];
    for (says, memory) in memories {
        let (status, text) = make_sender(&own, &good, &memory).unwrap_err();
        assert!(status == FbInvalidConfig && text.contains(says), "{says}: {text}");
    }
    let configs = [
        (FbInvalidConfig, "fabric", FbTransferConfig { fabric: 0, ..own }),
        (FbInvalidConfig, "stage", FbTransferConfig { stage: 1, ..own }),
        (FbOutOfRange, "rank", FbTransferConfig { lane: 1, ..own }),
        (FbInvalidConfig, "guessed", FbTransferConfig { token_bytes: 3, ..own }),
        (FbInvalidConfig, "alive", FbTransferConfig { alive_ms: 10, lost_ms: 5, ..own }),
        (FbInvalidConfig, "queue", FbTransferConfig { queue_bytes: 1, ..own }),
        (FbInvalidConfig, "reserved", FbTransferConfig { reserved: 1, ..own }),
        (FbInvalidConfig, "address", FbTransferConfig { address: c"127.0.0.1:0".as_ptr(), ..own }),
    ];
    for (wanted, says, config) in configs {
        let (status, text) = make_sender(&config, &good, &memory).unwrap_err();
        assert!(status == wanted && text.contains(says), "{says}: {text}");
    }
}

#[test]
fn a_receiver_that_cannot_be_is_refused_with_its_field() {
    let (model, mut memory) = (Model::new(), Memory::new());
    let planes = memory.planes();
    let listens =
        |address: &CStr| FbTransferConfig { address: address.as_ptr(), ..config(FB_TRANSFER_TCP, 2) };
    let own = listens(c"127.0.0.1:0");
    let refused = |config: &FbTransferConfig, planes: &[FbReceivePlane]| {
        make_receiver(config, &model.side(), planes).unwrap_err()
    };
    let with = |plane: FbReceivePlane| {
        let mut planes = planes.clone();
        planes[1] = plane;
        planes
    };
    let lists = [
        ("plane_count", planes[1..].to_vec()),
        ("address of a plane", with(FbReceivePlane { address: null_mut(), ..planes[1] })),
        ("page_bytes of a plane", with(FbReceivePlane { page_bytes: 3, ..planes[1] })),
        ("bytes of a plane", with(FbReceivePlane { bytes: u64::MAX, ..planes[1] })),
    ];
    for (says, planes) in lists {
        let (status, text) = refused(&own, &planes);
        assert!(status == FbInvalidConfig && text.contains(says), "{says}: {text}");
    }
    let open = FbTransferConfig { token: null(), token_bytes: 0, ..listens(c"0.0.0.0:0") };
    for (says, config) in [
        ("address", FbTransferConfig { address: null(), ..own }),
        ("no address and port", listens(c"here")),
        ("without a token", open),
    ] {
        let (status, text) = refused(&config, &planes);
        assert!(status == FbInvalidConfig && text.contains(says), "{says}: {text}");
    }
    // Two at one address.
    let path = address(FB_TRANSFER_SHM);
    let first = FbTransferConfig { address: path.as_ptr(), ..config(FB_TRANSFER_SHM, 2) };
    let made = make_receiver(&first, &model.side(), &planes).unwrap();
    assert_eq!(refused(&first, &planes).0, FbBusy);
    // SAFETY: a handle.
    assert_eq!(unsafe { fb_receiver_destroy(made) }, FbOk);
    memory.check(&BTreeMap::new());
}

#[test]
fn a_plan_says_whether_two_sides_fit() {
    let (from, mut to) = (Model::new(), Model::new());
    let plan = |from: &Model, to: &Model| {
        let (mut text, mut bytes) = ([0; 512], 0);
        let (from, to) = (from.side(), to.side());
        // SAFETY: everything is valid and as long as stated.
        let status =
            unsafe { fb_transfer_plan(&from, &to, 100, text.as_mut_ptr(), text.len(), &raw mut bytes) };
        (status, bytes, text_in(&text))
    };
    assert_eq!(plan(&from, &to), (FbOk, 100 * u64::from(LAYERS) * 52, String::new()));
    to.components[0].dtype = c"fp8".as_ptr();
    let (status, bytes, text) = plan(&from, &to);
    assert!(status == FbInvalidConfig && bytes == 0 && text.contains("type"), "{text}");
}
