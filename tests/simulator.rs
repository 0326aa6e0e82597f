//! The simulator on the built-in setup: what was fitted, what comes out.
#![allow(clippy::unwrap_used)]

use forebay::predict::fit::{Fitted, Measurements, fit};
use forebay::predict::setup::Setup;

/// What `data/setups/ess.json` is made of.
const MEASUREMENTS: &str = include_str!("../data/setups/ess-measurements.json");

fn fitted() -> Fitted {
    fit(&Measurements::parse(MEASUREMENTS).unwrap()).unwrap()
}

fn ess() -> Setup {
    Setup::named("ess").unwrap().unwrap()
}

#[test]
fn the_built_in_setup_is_what_the_fit_makes_of_the_measurements() {
    let text = fitted().setup.file().text().unwrap();
    assert_eq!(Setup::parse(&text).unwrap().file(), fitted().setup.file());
    let made = text == include_str!("../data/setups/ess.json");
    assert!(made, "make it anew: forebay fit data/setups/ess-measurements.json --out data/setups/ess.json");
    assert_eq!(ess().name(), "ess");
}
