//! Figures of PyTorch's own allocator for recorded programs, from a JSON file.
//!
//! The file maps a program's name to `configs`, which maps a name to `options`, peaks, counts and
//! times; other keys are skipped.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use aquifer_trace::input::{InputError, Location, Program, Reason};
use serde::Deserialize;
use serde::de::Error;

use super::Row;
use crate::commands::ratio;
use crate::exit::Failure;

/// The configurations of the file that are shown.
const SHOWN: [&str; 2] = ["default", "expandable"];

/// The longest file: many thousand programs, and a bound for endless ones, such as `/dev/zero`.
const BYTES_MAX: u64 = 16 << 20;

/// The figures, by program and configuration.
#[derive(Debug)]
pub(super) struct Recorded {
    path: PathBuf,
    programs: BTreeMap<String, Measured>,
}

#[derive(Debug, Deserialize)]
struct Measured {
    configs: BTreeMap<String, Figures>,
}

#[derive(Debug, Deserialize)]
struct Figures {
    options: String,
    peak_reserved_bytes: u64,
    ooms: u64,
    smallest_device_bytes: Option<u64>,
    ns_per_op_torch_2_15: Option<f64>,
}

/// Reads the file.
pub(super) fn load(path: &Path) -> Result<Recorded, Failure> {
    let failed = |reason| InputError { path: path.to_owned(), location: Location::File, reason };
    let mut text = Vec::new();
    let read = File::open(path).and_then(|file| file.take(BYTES_MAX + 1).read_to_end(&mut text));
    read.map_err(|error| failed(Reason::Io(error)))?;
    if text.len() as u64 > BYTES_MAX {
        return Err(failed(Reason::TooLong { most: BYTES_MAX }).into());
    }
    if text.is_empty() {
        return Err(failed(Reason::Empty).into());
    }
    let programs = serde_json::from_slice(&text).map_err(|error| {
        let error = if error.is_syntax() { Error::custom(format!("not valid JSON: {error}")) } else { error };
        failed(Reason::Json(error))
    })?;
    Ok(Recorded { path: path.to_owned(), programs })
}

impl Recorded {
    /// The rows of a program that is reported as `name`, or a note if the file has none.
    pub(super) fn rows(&self, name: &str, program: &Program) -> Result<Vec<Row>, String> {
        let none = || format!("note: {} has no figures of {name}", self.path.display());
        let measured = self.programs.get(&program.name).ok_or_else(none)?;
        let shown = SHOWN.iter().filter_map(|config| measured.configs.get(*config));
        let requested = program.peak_requested_bytes;
        let row = |figures: &Figures| Row {
            trace: name.to_owned(),
            config: format!("pytorch {}", figures.options).trim_end().to_owned(),
            peak_requested_bytes: requested,
            peak_reserved_bytes: figures.peak_reserved_bytes,
            reserved_over_requested: ratio(figures.peak_reserved_bytes, requested),
            first_pass_reserved_over_requested: ratio(figures.peak_reserved_bytes, requested),
            smallest_device_bytes: figures.smallest_device_bytes,
            smallest_over_requested: figures.smallest_device_bytes.and_then(|bytes| ratio(bytes, requested)),
            allocs: program.allocs(),
            ns_per_op: figures.ns_per_op_torch_2_15,
            ooms: figures.ooms,
            ..Row::default()
        };
        let rows: Vec<Row> = shown.map(row).collect();
        if rows.is_empty() { Err(none()) } else { Ok(rows) }
    }
}
