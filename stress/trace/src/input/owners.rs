//! The blocks that had an address, one after the other: for pointers that outlive their memory.

use std::fs::File;
use std::io::{BufReader, Read};
use std::path::Path;

use super::allowance::Allowance;
use super::error::{Fault, InputError, Reason};
use super::program::Site;
use super::snapshot::{Action, Entry, Snapshot};
use super::sniff::{self, Format};
use super::{gzip, json, structure, unpickle};
use crate::headline::headline;

/// A block that had an address. Entries of the history count from 1.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[expect(missing_docs, reason = "named by the type")]
pub struct Owner {
    pub device: u32,
    pub start: u64,
    pub bytes: u64,
    pub stream: u64,
    pub tag: Option<String>,
    /// What stands for its call stack.
    pub place: String,
    /// The entry that allocated it; `None` before the history begins.
    pub from: Option<u64>,
    /// The entry that gave it back; `None` if it was live in the end.
    pub to: Option<u64>,
    /// The entry that unmapped its memory, before another block had the address.
    pub unmapped: Option<u64>,
}

/// The blocks that had an address, by device, oldest first, as a snapshot tells.
///
/// # Errors
/// As [`super::load`], and for a recording without addresses.
pub fn owners(path: &Path, address: u64) -> Result<Vec<Owner>, InputError> {
    let read = || {
        let allowance = Allowance::default();
        let file: Box<dyn Read> = if path == Path::new("-") {
            Box::new(std::io::stdin())
        } else {
            Box::new(File::open(path).map_err(|error| Fault::file(Reason::Io(error)))?)
        };
        let content = Box::new(allowance.stored(file));
        let (format, content) = sniff::open(path, gzip::open(content, &allowance)?)?;
        let content = BufReader::new(allowance.content(content));
        let (top, mut arena) = match format {
            Format::Pickle => unpickle::run(content, &allowance)?,
            Format::Json => json::parse(content, &allowance)?,
            _ => return Err(Fault::file(Reason::NoAddresses)),
        };
        let snapshot = structure::snapshot(top, &mut arena, &allowance)?;
        let known = snapshot.traces.iter().flatten().filter_map(|entry| entry.addr);
        if known.chain(snapshot.segments.iter().map(|segment| segment.address)).all(|address| address == 0) {
            return Err(Fault::file(Reason::NoAddresses));
        }
        Ok(owners_in(&snapshot, address))
    };
    read().map_err(|fault| fault.at(path))
}

fn owners_in(snapshot: &Snapshot, address: u64) -> Vec<Owner> {
    let has = |start: u64, bytes: u64| (start..start.saturating_add(bytes)).contains(&address);
    let owner = |device, (start, bytes, stream), site: Site, from| Owner {
        device,
        start,
        bytes,
        stream,
        tag: snapshot.labels.text(site.tag).map(str::to_owned),
        place: headline(&snapshot.labels, site.stack),
        from,
        ..Owner::default()
    };
    let mut all: Vec<Owner> = Vec::new();
    for (device, trace) in (0_u32..).zip(&snapshot.traces) {
        let first = all.len();
        for (now, &Entry { action, addr, size, stream, site, .. }) in (1..).map(Some).zip(trace) {
            let (Some(start), Some(bytes)) = (addr, size) else { continue };
            if !has(start, bytes) {
                continue;
            }
            match action {
                Action::Alloc => {
                    all[first..].iter_mut().for_each(|owner| owner.to = owner.to.or(now));
                    all.push(owner(device, (start, bytes, stream), site, now));
                }
                Action::FreeRequested | Action::FreeCompleted => match all[first..].last_mut() {
                    Some(last) => last.to = last.to.or(now),
                    None => all.push(Owner { to: now, ..owner(device, (start, bytes, stream), Site::default(), None) }),
                },
                Action::SegmentFree => {
                    all[first..].last_mut().into_iter().for_each(|last| last.unmapped = last.unmapped.or(now));
                }
                _ => {}
            }
        }
    }
    // Live blocks without an entry are from before the history.
    for segment in &snapshot.segments {
        let device = u32::try_from(segment.device).unwrap_or(u32::MAX);
        let is_known = |start| all.iter().any(|one| one.device == device && one.start == start && one.to.is_none());
        let found = segment.allocated.iter().find(|&&(start, bytes, _)| has(start, bytes) && !is_known(start));
        let found = found.map(|&(start, bytes, site)| owner(device, (start, bytes, segment.stream), site, None));
        all.extend(found);
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn owners_follow_each_other_from_before_the_history_to_its_end() {
        let entry = |action: &str, addr: u64, size: u64| {
            format!(r#"{{"action": "{action}", "addr": {addr}, "size": {size}, "stream": 7, "user_metadata": "kv"}}"#)
        };
        let (free, alloc) = ("free_completed", "alloc");
        let entries = [(free, 8192, 1024), (alloc, 8704, 512), (alloc, 12288, 512), (free, 8704, 512)];
        let entries = entries.into_iter().chain([("segment_unmap", 8192, 4096)]);
        let entries = entries.map(|(action, addr, size)| entry(action, addr, size)).collect::<Vec<_>>().join(",");
        let block = r#"{"address": 4096, "size": 512, "requested_size": 512, "state": "active_allocated"}"#;
        let segment = format!(r#"{{"device": 0, "stream": 3, "address": 4096, "blocks": [{block}]}}"#);
        let path = std::env::temp_dir().join(format!("aquifer-owners-{}.json", std::process::id()));
        std::fs::write(&path, format!(r#"{{"segments": [{segment}], "device_traces": [[{entries}]]}}"#)).unwrap();
        let said = |address| {
            let all = owners(&path, address).unwrap().into_iter();
            all.map(|one| (one.start, one.tag.is_some(), [one.from, one.to, one.unmapped])).collect::<Vec<_>>()
        };
        let before = (8192, false, [None, Some(1), None]);
        assert_eq!(said(8800), [before, (8704, true, [Some(2), Some(4), Some(5)])]);
        assert_eq!(said(8192), [(8192, false, [None, Some(1), Some(5)])]);
        assert_eq!([said(4607), said(4608)], [vec![(4096, false, [None; 3])], vec![]]);
        assert_eq!(said(12799), [(12288, true, [Some(3), None, None])]);
        let block = r#"{"size": 512, "state": "active_allocated"}"#;
        let bare = format!(r#"{{"segments": [{{"device": 0, "blocks": [{block}]}}], "device_traces": [[]]}}"#);
        for text in [&bare, "a 0 512 0\n"] {
            std::fs::write(&path, text).unwrap();
            assert!(owners(&path, 0).unwrap_err().to_string().contains("no addresses"), "{text}");
        }
        std::fs::remove_file(path).unwrap();
    }
}
