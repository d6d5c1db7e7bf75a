//! The commands, one module each.

mod address;
pub mod advise;
pub mod compare;
pub mod demo;
pub mod explain;
pub mod fit;
pub mod fragmentation;
pub mod oom;
pub mod options;
pub mod replay;
pub mod report;
pub mod run;
mod story;
pub mod study;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use aquifer::memory::{HistoryOptions, Snapshot};
use aquifer::{Allocator, Device};
use aquifer_trace::input::{self, Program};
use serde_json::json;

use crate::cli::{RECORDING, fitted};
use crate::exit::{Failure, Outcome};
use crate::session::Session;
use crate::text::one_line;

/// Reads the programs of one of `files`, with the names to report them under, and reports the
/// reader's notes. If files in different folders or formats have the same name, their paths follow
/// the names.
fn programs(
    session: &Session,
    file: &Path,
    files: &[PathBuf],
    names: &mut Names,
    states: bool,
) -> Result<Vec<(String, Program)>, Failure> {
    let programs = if states { input::load_with_states(file)? } else { input::load(file)? };
    let stem = input::stem(file);
    let ambiguous = files.iter().any(|other| other != file && input::stem(other) == stem);
    let mut notes = 0;
    let named = programs.into_iter().map(|program| {
        let with_path = ambiguous && program.name.starts_with(&stem);
        let name = names.distinct(&program.name, file, with_path);
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

/// The most notes of a file that are shown.
const NOTES_SHOWN: usize = 20;

/// An option string in messages.
fn options(config: &str) -> &str {
    if config.is_empty() { "the defaults" } else { config }
}

/// Reports that the work on a program failed.
fn failed(session: &Session, name: &str, failure: &Failure, outcome: &mut Outcome) {
    *outcome = (*outcome).max(failure.outcome());
    session.message(format_args!("error: {name}: {failure}"));
}

/// A message about refused requests of a program.
fn out_of_memory(trace: &str, config: &str, refused: u64, more: &str) -> String {
    let requests = if refused == 1 { "request was" } else { "requests were" };
    format!("out of memory: {trace} with {}: {refused} {requests} refused{more}", options(config))
}

/// Counts the findings of the race detector and reports the first ones.
pub fn violations(session: &Session, name: &str, device: &Device) -> u64 {
    const SHOWN: u64 = 3;
    let mut count = 0;
    while let Some(violation) = device.driver().take_violation() {
        count += 1;
        if count <= SHOWN {
            session.message(format_args!("violation: {name}: {violation}"));
        }
    }
    count
}

/// Writes the names and summaries for `--list`; in JSON, the key of a name is `key`.
fn list(
    session: &Session,
    width: usize,
    key: &str,
    all: impl IntoIterator<Item = (&'static str, &'static str)>,
) -> Result<Outcome, Failure> {
    for (name, summary) in all {
        session.row(&json!({ key: name, "summary": summary }))?;
        session.show(format_args!("{name:<width$} {summary}"))?;
    }
    Ok(Outcome::Done)
}

/// The longest path after a name, in characters.
const LONGEST_PATH: usize = 100;

/// The names under which programs are reported, and their files.
#[derive(Debug, Default)]
struct Names(BTreeMap<String, PathBuf>);

impl Names {
    /// A name that differs from those of other files.
    fn distinct(&mut self, name: &str, file: &Path, with_path: bool) -> String {
        let longer = format!("{name} ({})", one_line(&file.display().to_string(), LONGEST_PATH));
        let short = (!with_path).then(|| name.to_owned());
        let free = |name: &String| self.0.get(name).is_none_or(|of| of == file);
        let name = short.filter(free).unwrap_or(longer);
        self.0.insert(name.clone(), file.to_owned());
        name
    }
}

/// Reads the programs of all files, and of those in folders. Files that cannot be read are reported
/// and skipped.
fn all_programs(session: &Session, files: &[PathBuf], outcome: &mut Outcome) -> Vec<(String, Program)> {
    jobs(session, files, outcome, false).into_iter().flatten().collect()
}

/// The programs of each file or folder; with `states`, also of snapshots without a history.
fn jobs(session: &Session, paths: &[PathBuf], outcome: &mut Outcome, states: bool) -> Vec<Vec<(String, Program)>> {
    let (mut jobs, mut names) = (Vec::new(), Names::default());
    let files: Vec<Vec<PathBuf>> = paths.iter().map(|path| files_in(path)).collect();
    let all = files.concat();
    let mut has_other_content = false;
    for (path, files) in paths.iter().zip(files) {
        let (mut job, mut failed) = (Vec::new(), Vec::new());
        for file in &files {
            match programs(session, file, &all, &mut names, states) {
                Ok(programs) => job.extend(programs),
                Err(failure) => {
                    has_other_content |= matches!(&failure, Failure::Input(error) if error.reason.is_other_content());
                    failed.push(failure);
                }
            }
        }
        // A folder may have other files.
        let is_tolerable = path.is_dir() && !job.is_empty();
        for failure in failed {
            if is_tolerable {
                session.message(format_args!("note: left out: {failure}"));
            } else {
                *outcome = (*outcome).max(failure.outcome());
                session.message(format_args!("error: {failure}"));
            }
        }
        jobs.push(job);
    }
    if has_other_content && jobs.iter().all(Vec::is_empty) {
        session.message(fitted(RECORDING));
    }
    jobs
}

/// The session for a command that needs simulated devices: the given one, or one on the default
/// simulated device, which is reported.
///
/// # Errors
/// When it cannot be opened.
fn on_simulator(session: &Session, command: &str) -> Result<Option<Session>, Failure> {
    if session.sim().is_some() {
        return Ok(None);
    }
    Ok(Some(session.simulated(command)?.for_measuring()))
}

/// The files in a folder, by name, where numbers in names are in numerical order, without hidden
/// ones. A path that is no folder is its own only file.
fn files_in(file: &Path) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(file) else { return vec![file.to_owned()] };
    let is_shown = |path: &PathBuf| {
        path.is_file() && !path.file_name().is_some_and(|name| name.to_string_lossy().starts_with('.'))
    };
    let mut files: Vec<PathBuf> = entries.filter_map(|entry| Some(entry.ok()?.path())).filter(is_shown).collect();
    files.sort_by_cached_key(|path| numerical(&path.to_string_lossy()));
    // Reading an empty folder gives an error that names it.
    if files.is_empty() { vec![file.to_owned()] } else { files }
}

/// A text in which numbers of up to 20 digits are padded to one length.
fn numerical(text: &str) -> String {
    let mut key = String::new();
    for run in text.as_bytes().chunk_by(|one, other| one.is_ascii_digit() == other.is_ascii_digit()) {
        let run = String::from_utf8_lossy(run);
        if run.starts_with(|digit: char| digit.is_ascii_digit()) { key += &format!("{run:0>20}") } else { key += &run }
    }
    key
}

/// Records the latest `entries` of the history for a snapshot, unless the options set a number.
pub(crate) fn record_history(allocator: &Allocator, entries: usize) {
    if allocator.config().history == 0 {
        allocator.record_history(HistoryOptions { entries, ..HistoryOptions::default() });
    }
}

/// Saves a snapshot and reports it.
fn save(session: &Session, snapshot: &Snapshot, path: &Path) -> Result<(), Failure> {
    snapshot.save(path)?;
    let (entries, lost) = (snapshot.trace().len(), snapshot.entries_overwritten);
    let lost = if lost > 0 { format!(", without {lost} earlier ones") } else { String::new() };
    session.message(format_args!("snapshot: {}: {entries} entries of history{lost}", path.display()));
    Ok(())
}

/// `part / whole`, unless `whole` is 0.
#[expect(clippy::cast_precision_loss, reason = "a ratio to display")]
fn ratio(part: u64, whole: u64) -> Option<f64> {
    (whole > 0).then(|| part as f64 / whole as f64)
}

/// Rounded to hundredths: more digits of a time are noise.
fn hundredths(time: f64) -> f64 {
    (time * 100.0).round() / 100.0
}

/// Nanoseconds as microseconds.
#[expect(clippy::cast_precision_loss, reason = "a time to display")]
pub(crate) fn us(ns: u64) -> f64 {
    hundredths(ns as f64 / 1e3)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_in_names_are_in_numerical_order() {
        let mut names = ["rank10.pickle", "rank9.pickle", "größe", "rank1.pickle", "7"];
        names.sort_by_cached_key(|name| numerical(name));
        assert_eq!(names, ["7", "größe", "rank1.pickle", "rank9.pickle", "rank10.pickle"]);
    }

    #[test]
    fn programs_of_different_files_have_different_names() {
        let mut names = Names::default();
        let mut name = |name: &str, file: &str, with_path| names.distinct(name, file.as_ref(), with_path);
        assert_eq!(name("gpt", "a/gpt.trace", true), "gpt (a/gpt.trace)");
        assert_eq!(name("gpt", "b/gpt.trace", true), "gpt (b/gpt.trace)");
        // Names from headers.
        assert_eq!(name("run", "c.trace", false), "run");
        assert_eq!(name("run", "c.trace", false), "run", "the same file again");
        assert_eq!(name("run", "d.trace", false), "run (d.trace)");
    }
}
