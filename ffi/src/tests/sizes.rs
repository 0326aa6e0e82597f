//! Tests of the sizes that callers must state: never more bytes of a struct than its first version had.

use super::*;
use crate::capture::*;
use crate::choice::*;
use crate::dense::*;
use crate::dense_config::*;
use crate::dense_prefix::*;
use crate::dense_sequence::*;
use crate::links::*;
use crate::overlap::*;
use crate::plan::*;
use crate::receiver::*;
use crate::requests::*;
use crate::selections::*;
use crate::sender::*;
use crate::trace::*;
use crate::transfer::*;
use crate::weights::*;

fn required<T: Versioned>() -> (&'static str, usize, usize) {
    (T::NAME, T::REQUIRED, size_of::<T>())
}

/// Never change a number here: a struct that needs more is another struct.
#[test]
fn the_sizes_that_callers_must_state_do_not_change() {
    let found = [
        (required::<FbDeviceConfig>(), 12),
        (required::<FbCacheConfig>(), 52),
        (required::<FbCacheFootprint>(), 72),
        (required::<FbStats>(), 112),
        (required::<FbInfo>(), 88),
        (required::<FbOpenConfig>(), 16),
        (required::<FbBudget>(), 32),
        (required::<FbWarmUp>(), 24),
        (required::<FbSequenceLength>(), 24),
        (required::<FbTokens>(), 20),
        (required::<FbStepConfig>(), 24),
        (required::<FbRetired>(), 32),
        (required::<FbDenseConfig>(), 120),
        (required::<FbDenseCacheFootprint>(), 64),
        (required::<FbDenseCacheStats>(), 144),
        (required::<FbDenseLayerView>(), 40),
        (required::<FbDenseStepTensors>(), 112),
        (required::<FbDenseSequenceLength>(), 20),
        (required::<FbDenseFound>(), 16),
        (required::<FbStepRange>(), 12),
        (required::<FbBuffers>(), 24),
        (required::<FbEngine>(), 24),
        (required::<FbOverlapConfig>(), 88),
        (required::<FbHysteresis>(), 40),
        (required::<FbChooserConfig>(), 24),
        (required::<FbChoice>(), 24),
        (required::<FbCaptureConfig>(), 32),
        (required::<FbTraceConfig>(), 24),
        (required::<FbArrival>(), 40),
        (required::<FbTraceHeader>(), 56),
        (required::<FbPlanConfig>(), 28),
        (required::<FbPlanned>(), 136),
        (required::<FbTensor>(), 28),
        (required::<FbWeightsConfig>(), 44),
        (required::<FbWeightsFootprint>(), 112),
        (required::<FbLayerWeights>(), 52),
        (required::<FbLinksConfig>(), 16),
        (required::<FbLinksEvent>(), 24),
        (required::<FbTransferSide>(), 56),
        (required::<FbTransferConfig>(), 40),
        (required::<FbTransferEvent>(), 84),
        (required::<FbSendMemory>(), 28),
        (required::<FbComputed>(), 36),
        (required::<FbSent>(), 72),
        (required::<FbLag>(), 32),
        (required::<FbWanted>(), 40),
        (required::<FbReceived>(), 48),
    ];
    for ((name, required, size), recorded) in found {
        assert!(required == recorded && required <= size, "{name}: {required} of {size}");
    }
    let sources = std::fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/src")).unwrap();
    let texts = sources.filter_map(|file| std::fs::read_to_string(file.unwrap().path()).ok());
    let texts: Vec<String> = texts.collect();
    let count = |word: &str| texts.iter().map(|text| text.matches(word).count()).sum::<usize>();
    assert_eq!(count("impl Versioned for Fb"), found.len(), "a struct is missing here");
    // If a nested struct grew, the stated size would grow with it.
    assert_eq!(count(concat!("REQUIRED: usize = size_of", "::<")), 0);
}
