//! Recorded programs: reads allocation traces, PyTorch memory snapshots and RMM logs.
//!
//! [`load`] recognises a file by its content, not by its name:
//!
//! | content | programs |
//! |---|---|
//! | an allocation trace (text) | one |
//! | a PyTorch memory snapshot with history (pickle or JSON), or a list of them, one per rank | one per rank and device with a history |
//! | a page of PyTorch's `_memory_viz` | those of the snapshots in it |
//! | an RMM log (CSV, with a header or without) | one per device |
//!
//! Each may be compressed with gzip, xz or zstd, and any number of them may lie in a zip archive.
//! Files are read as streams, archives and pages as a whole. Memory grows with the content that was
//! read, never with a claimed length, and not beyond the need of a recording of that size
//! (`allowance.rs`). A damaged file causes an [`InputError`].
//!
//! Pickles and JSON are read into the same values (`arena.rs`), where `structure.rs` finds
//! snapshots. `others.rs` names files that are no recordings. `recording.rs` completes recordings
//! that begin later than the program or have gaps.

mod allowance;
mod archive;
mod arena;
mod error;
mod json;
mod labels;
mod layers;
mod lines;
mod others;
mod page;
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
pub use program::{Event, PoolUse, Program, Site};

use allowance::Allowance;
use error::Fault;
use layers::Content;
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
    let origin = Origin { name: sniff::stem(path), path, layers: 0, states, allowance: &allowance };
    parse(&origin, Box::new(allowance.stored(bytes))).map_err(|fault| fault.at(path))
}

/// The origin of a content.
struct Origin<'a> {
    /// The name of its program, unless it has one of its own.
    name: String,
    /// The file's name, or the name in an archive.
    path: &'a Path,
    /// The number of layers around it.
    layers: u32,
    /// Whether snapshots may lack a history.
    states: bool,
    allowance: &'a Allowance,
}

fn parse(origin: &Origin<'_>, bytes: Content<'_>) -> Result<Vec<Program>, Fault> {
    let Origin { name, path, states, allowance, .. } = origin;
    let (content, layers) = layers::open(bytes, origin.layers, allowance)?;
    let (format, content) = sniff::open(path, content)?;
    let packed = || match layers {
        error::LAYERS_MAX.. => Err(Fault::file(Reason::TooManyLayers)),
        _ => Ok(Origin { name: name.clone(), path, layers, states: *states, allowance }),
    };
    let buffered = |content| BufReader::with_capacity(64 << 10, allowance.content(content));
    let values = |(top, mut arena)| structure::programs(top, &mut arena, name, *states, allowance);
    match format {
        Format::Archive => archive::programs(content, &packed()?),
        Format::Page => page::programs(content, &packed()?),
        Format::Trace => Ok(vec![trace::parse(buffered(content), name.clone(), allowance)?]),
        Format::Rmm => rmm::parse(buffered(content), name, allowance),
        Format::Pickle => values(unpickle::run(buffered(content), allowance)?),
        Format::Json => values(json::parse(buffered(content), allowance)?),
    }
}

/// Parses content in an archive or a page, whose programs stay in memory.
fn parse_inside(outer: &Origin<'_>, name: String, path: &Path, content: impl Read) -> Result<Vec<Program>, Fault> {
    let inner = Origin { name, path, layers: outer.layers + 1, ..*outer };
    let programs = parse(&inner, Box::new(content))?;
    let labels = programs.first().map_or(0, |program| program.labels.bytes());
    outer.allowance.keep(programs.iter().map(Program::bytes).sum::<usize>() + labels);
    Ok(programs)
}

#[cfg(test)]
mod tests;
