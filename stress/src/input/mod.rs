//! Recorded programs: reads allocation traces, PyTorch memory snapshots and RMM logs.
//!
//! [`load`] looks at what a file holds, not at its name:
//!
//! | content | programs |
//! |---|---|
//! | an allocation trace (text) | one |
//! | a PyTorch memory snapshot with history (pickle or JSON) | one per device with a history |
//! | an RMM log (CSV) | one |
//!
//! Each may be compressed with gzip. Files are read as streams; memory grows with what a file holds, never
//! with what it only claims to hold nor beyond what a snapshot of its size takes, and a damaged file gives an [`InputError`].

mod allowance;
mod arena;
mod error;
mod gzip;
mod json;
mod lines;
mod object;
mod pickle;
mod program;
mod rmm;
mod snapshot;
mod sniff;
mod trace;
mod unpickle;
mod watched;

use std::fs::File;
use std::io::{BufReader, Read};
use std::path::Path;

pub use error::{Block, InputError, Location, Reason};
pub use program::{Event, Program};

pub(crate) use object::{FromObject, Object};

use error::Fault;
use sniff::Format;

/// The name under which a user names standard input.
const STANDARD_INPUT: &str = "-";

/// Reads the programs a file holds, in order of device; `-` is standard input.
///
/// # Errors
///
/// The file cannot be read, is of no known format, or is damaged; the error names the place and the reason.
pub fn load(path: &Path) -> Result<Vec<Program>, InputError> {
    if path == Path::new(STANDARD_INPUT) {
        return read(Path::new("standard input"), std::io::stdin().lock());
    }
    match File::open(path) {
        Ok(file) => read(path, file),
        Err(error) => Err(Fault::file(Reason::Io(error)).at(path)),
    }
}

/// As [`load`], from bytes of any origin; `path` only names them.
///
/// # Errors
///
/// As [`load`].
pub fn read(path: &Path, bytes: impl Read) -> Result<Vec<Program>, InputError> {
    parse(path, bytes).map_err(|fault| fault.at(path))
}

fn parse(path: &Path, bytes: impl Read) -> Result<Vec<Program>, Fault> {
    let (format, content, stored) = sniff::open(path, bytes)?;
    let content = BufReader::with_capacity(64 << 10, content);
    let name = sniff::stem(path);
    match format {
        Format::Trace => Ok(vec![trace::parse(content, name)?]),
        Format::Rmm => Ok(vec![rmm::parse(content, name)?]),
        Format::Pickle => snapshot::programs(pickle::parse(content, &stored)?, &name),
        Format::Json => snapshot::programs(json::parse(content, &stored)?, &name),
    }
}

#[cfg(test)]
mod tests;
