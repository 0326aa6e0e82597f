//! How far a fit is from what it was fitted to.

use forebay::predict::fit::{self, Fitted};

/// A residual as a share of the measured value; none if that is 0.
pub fn error_of(residual: &fit::Residual) -> Option<f64> {
    let error = (residual.fitted - residual.measured) / residual.measured;
    error.is_finite().then_some(error)
}

/// Mean and maximum of the absolute errors of whole steps; overlap residuals are compared in microseconds.
pub fn errors(fitted: &Fitted) -> (f64, f64) {
    let steps = fitted.residuals.iter().filter(|residual| residual.unit == "ms");
    let sizes: Vec<f64> = steps.filter_map(error_of).map(f64::abs).collect();
    let mean = sizes.iter().sum::<f64>() / sizes.len().max(1) as f64;
    (mean, sizes.into_iter().fold(0.0, f64::max))
}
