//! Recorded programs: reads allocation traces, PyTorch memory snapshots and RMM logs.
//!
//! [`load`] recognises a file by its content, not by its name:
//!
//! | content | programs |
//! |---|---|
//! | an allocation trace (text) | one |
//! | a PyTorch memory snapshot with history (pickle or JSON) | one per device with a history |
//! | an RMM log (CSV) | one |
//!
//! Each may be compressed with gzip. Files are read as streams. Memory grows with the content that
//! was read, never with a claimed length, and not beyond the need of a recording of that size
//! (`allowance.rs`). A damaged file causes an [`InputError`].
//!
//! Pickles and JSON are read into the same values (`arena.rs`), where `structure.rs` finds
//! snapshots. `recording.rs` completes recordings that begin later than the program or have gaps.

mod allowance;
mod arena;
mod error;
mod gzip;
mod json;
mod labels;
mod lines;
mod owners;
mod program;
mod recording;
mod rmm;
mod snapshot;
mod sniff;
mod structure;
mod trace;
mod unpickle;
mod watched;

use std::fs::File;
use std::io::{BufReader, Read};
use std::path::Path;

pub use error::{InputError, Location, Reason};
pub use labels::{Call, Labels};
pub use owners::{Owner, owners};
pub use program::{Event, PoolUse, Program, Recorded, RecordedOom, Recorder, Site};

use allowance::Allowance;
use error::Fault;
use gzip::Content;
use sniff::Format;

/// The name of standard input on the command line.
const STANDARD_INPUT: &str = "-";

/// Reads the programs a file holds, in order of device; `-` is standard input.
///
/// # Errors
///
/// The file cannot be read, is of no known format, or is damaged; the error names the place and the
/// reason.
pub fn load(path: &Path) -> Result<Vec<Program>, InputError> {
    load_with(path, false)
}

/// The same, and snapshots without a history: their programs only allocate what was live.
///
/// # Errors
///
/// As [`load`].
pub fn load_with_states(path: &Path) -> Result<Vec<Program>, InputError> {
    load_with(path, true)
}

fn load_with(path: &Path, states: bool) -> Result<Vec<Program>, InputError> {
    if path == Path::new(STANDARD_INPUT) {
        return read_with(Path::new("standard input"), std::io::stdin().lock(), states);
    }
    match File::open(path) {
        Ok(_) if path.is_dir() => Err(Fault::file(Reason::EmptyFolder).at(path)),
        Ok(file) => read_with(path, file, states),
        Err(error) => Err(Fault::file(Reason::Io(error)).at(path)),
    }
}

/// The name of a file's program, unless it has one of its own: the file's name without the suffixes
/// of formats.
pub fn stem(path: &Path) -> String {
    if path == Path::new(STANDARD_INPUT) { "standard input".into() } else { sniff::stem(path) }
}

/// As [`load`], from bytes of any origin; `path` only names them.
///
/// # Errors
///
/// As [`load`].
pub fn read(path: &Path, bytes: impl Read) -> Result<Vec<Program>, InputError> {
    read_with(path, bytes, false)
}

fn read_with(path: &Path, bytes: impl Read, states: bool) -> Result<Vec<Program>, InputError> {
    let allowance = Allowance::default();
    let content = Box::new(allowance.stored(bytes));
    parse(path, content, states, &allowance).map_err(|fault| fault.at(path))
}

fn parse(path: &Path, content: Content<'_>, states: bool, allowance: &Allowance) -> Result<Vec<Program>, Fault> {
    let name = sniff::stem(path);
    let (format, content) = sniff::open(path, gzip::open(content, allowance)?)?;
    let content = BufReader::with_capacity(64 << 10, allowance.content(content));
    let values = |(top, mut arena)| structure::programs(top, &mut arena, &name, states, allowance);
    match format {
        Format::Trace => Ok(vec![trace::parse(content, name, allowance)?]),
        Format::Rmm => Ok(vec![rmm::parse(content, name, allowance)?]),
        Format::Pickle => values(unpickle::run(content, allowance)?),
        Format::Json => values(json::parse(content, allowance)?),
    }
}

#[cfg(test)]
mod tests;
