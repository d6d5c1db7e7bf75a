//! `explain --address`: who had an address, and when.

use std::path::PathBuf;

use aquifer_trace::input::{Owner, owners};

use crate::commands::files_in;
use crate::exit::{Failure, Outcome};
use crate::row::{Row, row};
use crate::session::Session;
use crate::table::{bytes, optional};
use crate::text::plural;

row! {
    /// Of a block, with --address
    pub(crate) struct Owned {
        /// the file
        file: String,
        /// the device's ordinal there
        device: u32,
        /// the entry of the history that allocated it, from 1; null if it was there before
        from: Option<u64> => ["from entry", |row| optional(row.from)],
        /// the entry that gave it back; null if it was live in the end
        to: Option<u64> => ["to entry", |row| optional(row.to)],
        /// the entry that unmapped its memory, before another block had the address
        unmapped: Option<u64> => ["unmapped", |row| optional(row.unmapped)],
        /// its first address
        start: String => ["block"],
        /// its size
        bytes: u64 => ["bytes", bytes],
        /// how far into the block the address is
        offset: u64 => ["offset"],
        /// the stream that it was allocated for
        stream: u64 => ["stream"],
        /// its tag
        tag: Option<String> => ["tag", |row| optional(row.tag.as_ref())],
        /// the frame that stands for its call stack
        place: String => ["where"],
    }
}

/// Lists the owners of an address in each file.
pub(crate) fn run(session: &Session, paths: &[PathBuf], address: u64) -> Result<Outcome, Failure> {
    for path in paths.iter().flat_map(|path| files_in(path)) {
        let file = path.display().to_string();
        let owned = owners(&path, address)?.into_iter().map(|owner| {
            let Owner { device, start, bytes, stream, tag, place, from, to, unmapped } = owner;
            let (file, offset, start) = (file.clone(), address - start, format!("{start:#x}"));
            Owned { file, device, from, to, unmapped, start, bytes, offset, stream, tag, place }
        });
        let owned: Vec<Owned> = owned.collect();
        owned.iter().try_for_each(|row| session.row(row))?;
        let count = plural(owned.len() as u64, "block");
        session.show(format_args!("{file}: {count} had the address {address:#x}\n"))?;
        if !owned.is_empty() {
            session.show(format_args!("{}\n", Owned::table(&owned)))?;
        }
    }
    Ok(Outcome::Done)
}
