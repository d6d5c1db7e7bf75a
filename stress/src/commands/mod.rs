//! The commands, a module each.

pub mod bench;
pub mod calls;
pub mod compare;
pub mod demo;
pub mod fit;
pub mod fragmentation;
pub mod oom;
pub mod options;
pub mod replay;
pub mod run;
pub mod soak;
pub mod transfer;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use aquifer::Allocator;
use aquifer::memory::{HistoryOptions, Snapshot};

use crate::exit::{Failure, Outcome};
use crate::input::{self, Program};
use crate::session::Session;
use crate::text::one_line;

/// Reads the programs that one of `files` holds, with the names to report them under, and passes on
/// what the reader noted. Where files have the same name in different folders, or in different
/// formats, their paths follow the names.
///
/// # Errors
/// When the file cannot be read or is damaged.
pub fn programs(
    session: &Session,
    file: &Path,
    files: &[PathBuf],
    names: &mut Names,
) -> Result<Vec<(String, Program)>, Failure> {
    let programs = input::load(file)?;
    let stem = input::stem(file);
    let ambiguous = files.iter().any(|other| other != file && input::stem(other) == stem);
    let mut notes = 0;
    let named = programs.into_iter().map(|program| {
        let with_path = ambiguous && program.name.starts_with(&stem);
        let name = names.tell_apart(&program.name, file, with_path);
        let shown = program.notes.iter().take(NOTES_SHOWN.saturating_sub(notes));
        shown.for_each(|note| session.message(format_args!("note: {name}: {note}")));
        notes += program.notes.len();
        (name, program)
    });
    let named = named.collect();
    if notes > NOTES_SHOWN {
        session.message(format_args!("note: {stem}: {} more notes are left out", notes - NOTES_SHOWN));
    }
    Ok(named)
}

/// How many notes of a file are shown.
const NOTES_SHOWN: usize = 20;

/// What messages call an option string.
fn options(config: &str) -> &str {
    if config.is_empty() { "the defaults" } else { config }
}

/// The longest path behind a name in characters.
const LONGEST_PATH: usize = 100;

/// The names under which programs are reported, and their files.
#[derive(Debug, Default)]
pub struct Names(BTreeMap<String, PathBuf>);

impl Names {
    /// A name that no other program has, unless the same file is read again.
    fn tell_apart(&mut self, name: &str, file: &Path, with_path: bool) -> String {
        let longer = format!("{name} ({})", one_line(&file.display().to_string(), LONGEST_PATH));
        let short = (!with_path).then(|| name.to_owned());
        let free = |name: &String| self.0.get(name).is_none_or(|of| of == file);
        let name = short.filter(free).unwrap_or(longer);
        self.0.insert(name.clone(), file.to_owned());
        name
    }
}

/// Reads the programs that files hold. Files that cannot be read are reported, and the others read.
fn all_programs(session: &Session, files: &[PathBuf], outcome: &mut Outcome) -> Vec<(String, Program)> {
    let (mut all, mut names) = (Vec::new(), Names::default());
    for file in files {
        match programs(session, file, files, &mut names) {
            Ok(programs) => all.extend(programs),
            Err(failure) => {
                *outcome = (*outcome).max(failure.outcome());
                session.message(format_args!("error: {failure}"));
            }
        }
    }
    all
}

/// Records the latest `entries` of the history for a snapshot, unless the options say how many.
pub(crate) fn record_history(allocator: &Allocator, entries: usize) {
    if allocator.config().history == 0 {
        allocator.record_history(HistoryOptions { entries, ..HistoryOptions::default() });
    }
}

/// Saves a snapshot and says so.
fn save(session: &Session, snapshot: &Snapshot, path: &Path) -> Result<(), Failure> {
    snapshot.save(path)?;
    let (entries, lost) = (snapshot.trace().len(), snapshot.entries_overwritten);
    let lost = if lost > 0 { format!(", without {lost} earlier ones") } else { String::new() };
    session.message(format_args!("snapshot: {}: {entries} entries of history{lost}", path.display()));
    Ok(())
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_of_different_files_have_different_names() {
        let mut names = Names::default();
        let mut name = |name: &str, file: &str, with_path| names.tell_apart(name, file.as_ref(), with_path);
        assert_eq!(name("gpt", "a/gpt.trace", true), "gpt (a/gpt.trace)");
        assert_eq!(name("gpt", "b/gpt.trace", true), "gpt (b/gpt.trace)");
        // Names that headers give.
        assert_eq!(name("run", "c.trace", false), "run");
        assert_eq!(name("run", "c.trace", false), "run", "the same file again");
        assert_eq!(name("run", "d.trace", false), "run (d.trace)");
    }
}
