//! The commands.

pub(crate) mod simulate;
pub(crate) mod soak;

/// Whether nothing is wrong, and the result as JSON and as text.
pub(crate) type Outcome = (bool, String, String);

/// A number of minutes.
fn minutes(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(minutes) if (0.0..=1e6).contains(&minutes) && minutes > 0.0 => Ok(minutes),
        _ => Err("expected a number of minutes above 0 and up to 1000000, such as 5 or 0.5".to_owned()),
    }
}
