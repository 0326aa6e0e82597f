//! Estimates the time that a command still takes.
//!
//! Work is counted in pieces of similar cost. (Measured on the trace in `data/`: a step of a layer under the slowest
//! policy takes about twice as long as under the fastest.) The estimate assumes that the remaining pieces take as long
//! on average as all pieces so far; the mean of recent pieces alone would follow each policy and each pause.

use std::fmt::Write;
use std::path::Path;
use std::time::Duration;

use forebay::text::harmless;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressFinish, ProgressState, ProgressStyle};

/// The time left after `done` of `all` pieces; none before a piece is done.
pub fn left(elapsed: Duration, done: u64, all: u64) -> Option<Duration> {
    let pieces = all.saturating_sub(done) as f64 / done as f64;
    Duration::try_from_secs_f64(elapsed.as_secs_f64() * pieces).ok().filter(|_| done > 0)
}

/// The time in words.
fn words(left: Duration) -> String {
    match left.as_secs() {
        seconds @ 0..60 => format!("{seconds} s"),
        seconds @ 60..3600 => format!("{} min {:02} s", seconds / 60, seconds % 60),
        seconds => format!("{} h {:02} min", seconds / 3600, seconds / 60 % 60),
    }
}

/// A bar with this template, in which `{left}` is the estimate.
///
/// # Errors
/// Errors of the template.
pub fn style(template: &str) -> Result<ProgressStyle, indicatif::style::TemplateError> {
    let key = |state: &ProgressState, out: &mut dyn Write| {
        let left = state.len().and_then(|all| left(state.elapsed(), state.pos(), all));
        // A failed write only shows less.
        let _ = match left {
            Some(left) => write!(out, "about {} left", words(left)),
            None => write!(out, "{} s so far", state.elapsed().as_secs()),
        };
    };
    Ok(ProgressStyle::with_template(template)?.with_key("left", key).progress_chars("=> "))
}

/// A progress bar on standard error for `pieces` of work; hidden if that is no terminal.
pub fn bar(name: &str, pieces: u64) -> ProgressBar {
    let bar = ProgressBar::with_draw_target(Some(pieces), ProgressDrawTarget::stderr())
        .with_finish(ProgressFinish::AndClear);
    if let Ok(style) = style("{prefix} [{bar:30}] {percent}%, {left}") {
        bar.set_style(style);
    }
    bar.with_prefix(harmless(name))
}

/// A progress bar on standard error over steps of one layer each; hidden if that is no terminal.
pub fn of_trace(path: &Path, steps: u64) -> ProgressBar {
    bar(&path.display().to_string(), steps)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Milliseconds of each piece, on a simulated clock.
    type Run = Vec<u64>;

    /// The largest factor by which `estimate` is wrong between the first quarter of the time and the last piece.
    fn worst(run: &Run, estimate: impl Fn(&[u64], Duration) -> f64) -> f64 {
        let all: u64 = run.iter().sum();
        let mut now = 0;
        let mut worst = 1.0_f64;
        for (done, piece) in (1..run.len()).zip(run) {
            now += piece;
            if 4 * now >= all {
                let (said, is) =
                    (estimate(&run[..done], Duration::from_millis(now)), (all - now) as f64 / 1e3);
                worst = worst.max(said / is).max(is / said);
            }
        }
        worst
    }

    fn runs() -> Vec<Run> {
        // Times in hundredths of a second of the trace in data/ under each policy, at two sizes.
        let policies = [13, 15, 17, 27, 13, 17, 23, 29, 20, 24, 15, 18];
        let of_policies = |order: &[u64]| order.iter().flat_map(|cost| [*cost; 50]).collect();
        let (mut up, mut down) = (policies, policies);
        up.sort_unstable();
        down.sort_unstable_by(|a, b| b.cmp(a));
        let pause = |piece: usize| if piece.is_multiple_of(40) { 100 } else { 10 };
        vec![
            vec![10; 300],
            of_policies(&policies),
            of_policies(&up),
            of_policies(&down),
            (0..300).map(|piece| 5 + 15 * (piece % 2)).collect(),
            (0..300).map(pause).collect(),
        ]
    }

    #[test]
    fn after_the_first_quarter_the_time_left_is_right_within_a_factor_of_two() {
        for (number, run) in runs().iter().enumerate() {
            let of =
                |done: &[u64], now| left(now, done.len() as u64, run.len() as u64).unwrap().as_secs_f64();
            let found = worst(run, of);
            assert!(found < 2.0, "run {number}: {found}");
        }
    }

    #[test]
    fn control_the_last_piece_alone_does_not_predict_the_time_left() {
        let by_last = |run: &Run| {
            let of = |done: &[u64], _| (run.len() - done.len()) as f64 * *done.last().unwrap() as f64 / 1e3;
            worst(run, of)
        };
        assert!(runs()[4..].iter().all(|run| by_last(run) > 2.0));
    }

    #[test]
    fn no_time_is_shown_at_the_start_and_zero_is_left_at_the_end() {
        let second = Duration::from_secs(1);
        assert_eq!(left(second, 0, 10), None);
        assert_eq!(left(second, 0, 0), None);
        assert_eq!([left(second, 10, 10), left(second, 12, 10)], [Some(Duration::ZERO); 2]);
        assert_eq!([12, 75, 3700].map(|s| words(s * second)), ["12 s", "1 min 15 s", "1 h 01 min"]);
    }
}
