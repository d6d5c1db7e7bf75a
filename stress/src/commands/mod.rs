//! The commands, a module each.

pub mod bench;
pub mod demo;
pub mod fit;
pub mod fragmentation;
pub mod oom;
pub mod replay;

use std::path::Path;

use crate::exit::Failure;
use crate::input::{self, Program};
use crate::session::Session;

/// Reads the programs that a file holds, with the names to report them under, and passes on what the reader noted.
///
/// # Errors
/// When the file cannot be read or is damaged.
pub fn programs(session: &Session, file: &Path) -> Result<Vec<(String, Program)>, Failure> {
    let programs = input::load(file)?;
    let several = programs.len() > 1;
    let named = programs.into_iter().map(|program| {
        let name = if several { format!("{}/device{}", program.name, program.device) } else { program.name.clone() };
        program.notes.iter().for_each(|note| session.message(format_args!("note: {name}: {note}")));
        (name, program)
    });
    Ok(named.collect())
}

/// `part / whole`, unless that is no number.
#[expect(clippy::cast_precision_loss, reason = "a ratio for people")]
fn ratio(part: u64, whole: u64) -> Option<f64> {
    (whole > 0).then(|| part as f64 / whole as f64)
}

/// Rounded to hundredths, as more digits of a time say nothing.
fn hundredths(time: f64) -> f64 {
    (time * 100.0).round() / 100.0
}
