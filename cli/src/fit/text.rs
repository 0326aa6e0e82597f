//! A fit as text.

use forebay::predict::fit::Fitted;
use forebay::predict::provenance::Provenance;

use super::result::{error_of, errors};
use crate::present::numbers::{fixed, number, signed};
use crate::present::output::harmless;
use crate::present::provenance;
use crate::present::terminal::{Look, Spare, align_right};

/// The whole report.
pub fn report(fitted: &Fitted, look: Look) -> String {
    let provenance = Provenance::of(&fitted.setup);
    let mut out = provenance::header(std::iter::once(&provenance)) + "\n";
    if !fitted.found.is_empty() {
        let mut found = look.table();
        found.set_header(["found", "value", "unit"]);
        for one in &fitted.found {
            found.add_row([one.name.to_owned(), format!("{:.4}", one.value), one.unit.to_owned()]);
        }
        align_right(&mut found, |column| column == 1);
        out += &format!("{}\n\n", look.fit(found, &Spare { keys: 1, ..Spare::default() }));
    }
    let mut residuals = look.table();
    residuals.set_header(["measured", "", "fitted", "residual", "", "row"]);
    for residual in &fitted.residuals {
        let share = error_of(residual).map_or(String::new(), |error| signed(&fixed(100.0 * error, 1)) + "%");
        let difference = signed(&number(residual.fitted - residual.measured));
        let what = format!("{} ({})", harmless(&residual.what), harmless(&residual.row));
        residuals.add_row([
            number(residual.measured),
            residual.unit.to_owned(),
            number(residual.fitted),
            difference,
            share,
            what,
        ]);
    }
    align_right(&mut residuals, |column| column != 1 && column != 5);
    let (mean, most) = errors(fitted);
    out += &look.fit(residuals, &Spare { text: Some("row"), ..Spare::default() });
    out += &format!(
        "\n\nWhole steps: mean error {:.1}%, at most {:.1}%.\n\
         The rows above were fitted. docs/simulator.md compares rows that were not.\n",
        100.0 * mean,
        100.0 * most
    );
    out + &provenance::footer(std::iter::once(&provenance))
}
