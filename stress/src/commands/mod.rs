//! The commands, a module each.

pub mod bench;
pub mod calls;
pub mod compare;
pub mod demo;
pub mod fit;
pub mod fragmentation;
pub mod oom;
pub mod replay;
pub mod soak;
pub mod transfer;

use std::path::{Path, PathBuf};

use crate::exit::{Failure, Outcome};
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

/// Reads the programs that files hold. Files that cannot be read are reported, and the others read.
fn all_programs(session: &Session, files: &[PathBuf], outcome: &mut Outcome) -> Vec<(String, Program)> {
    let mut all = Vec::new();
    for file in files {
        match programs(session, file) {
            Ok(programs) => all.extend(programs),
            Err(failure) => {
                *outcome = (*outcome).max(failure.outcome());
                session.message(format_args!("error: {failure}"));
            }
        }
    }
    all
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

/// Rounded to thousandths: nanoseconds of a time in microseconds.
fn thousandths(time: f64) -> f64 {
    (time * 1000.0).round() / 1000.0
}
