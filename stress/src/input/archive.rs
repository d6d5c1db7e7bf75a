//! Recordings in a zip archive, such as those of several ranks, or one that `torch.save` wrote.

use std::io::{self, Read};

use flate2::bufread::DeflateDecoder;
use rawzip::{CompressionMethod, ZipArchive};

use super::error::{Damage, Fault, Reason};
use super::layers::Content;
use super::program::Program;
use super::{Origin, parse, sniff};

/// The longest archive. It is held in memory, as its directory is at its end.
const LONGEST: u64 = 4 << 30;

const WHAT: &str = "zip";

/// Reads all recordings; other files are left out and noted.
pub(super) fn programs(content: Content<'_>, origin: &Origin<'_>) -> Result<Vec<Program>, Fault> {
    let mut bytes = Vec::new();
    content.take(LONGEST + 1).read_to_end(&mut bytes).map_err(|error| Fault::file(Reason::from_read(error)))?;
    if bytes.len() as u64 > LONGEST {
        return Err(Fault::file(Reason::TooLong { most: LONGEST }));
    }
    let mut recordings = Vec::new();
    let (mut others, mut why) = (0, None);
    each(&bytes, |path, content| {
        let name = format!("{}/{}", origin.name, sniff::without_suffixes(path));
        let inside = Origin { name, path: path.as_ref(), layers: origin.layers + 1, allowance: origin.allowance };
        match parse(&inside, Box::new(origin.allowance.unpacked(content))) {
            Ok(programs) => {
                origin.allowance.keep(programs.iter().map(Program::bytes).sum());
                recordings.push((inside.name, programs));
            }
            Err(fault) if is_other(fault.reason()) => {
                others += 1;
                if why.is_none() || !matches!(fault.reason(), Reason::Unrecognised { .. } | Reason::Empty) {
                    why = Some(fault.within(&format!("/{path}")));
                }
            }
            Err(fault) => return Err(fault.within(&format!("/{path}"))),
        }
        Ok(())
    })?;
    if let [(name, programs)] = &mut recordings[..] {
        // The only recording is the archive's.
        for program in programs {
            if let Some(which) = program.name.strip_prefix(&**name) {
                program.name = format!("{}{which}", origin.name);
            }
        }
    }
    let mut programs: Vec<Program> = recordings.into_iter().flat_map(|(_, programs)| programs).collect();
    match programs.first_mut() {
        Some(first) if others == 1 => first.notes.push("1 file of the archive is no recording, left out".into()),
        Some(first) if others > 1 => {
            first.notes.push(format!("{others} files of the archive are no recordings, left out"));
        }
        Some(_) => {}
        None => return Err(why.unwrap_or(Fault::file(Reason::NothingInside("the archive")))),
    }
    Ok(programs)
}

/// Hands the files on, with their names.
fn each(bytes: &[u8], mut take: impl FnMut(&str, Content<'_>) -> Result<(), Fault>) -> Result<(), Fault> {
    let damaged = |why: String| Fault::file(Reason::Damaged { what: WHAT, why });
    let archive = ZipArchive::from_slice(bytes).map_err(|error| damaged(error.to_string()))?;
    let mut entries = archive.entries();
    // Files that share their data could hold much more than the archive.
    let mut left = bytes.len();
    while let Some(entry) = entries.next_entry().map_err(|error| damaged(error.to_string()))? {
        let path = String::from_utf8_lossy(entry.file_path().as_bytes()).into_owned();
        if entry.is_dir() || path.starts_with("__MACOSX/") {
            continue;
        }
        let here = |why: String| damaged(why).within(&format!("/{path}"));
        let local = archive.get_entry(entry.wayfinder()).map_err(|error| here(error.to_string()))?;
        let data = local.data();
        left = left.checked_sub(data.len()).ok_or_else(|| here("its files overlap".into()))?;
        let content: Content<'_> = match entry.compression_method() {
            _ if entry.flags().is_encrypted() => return Err(here("it is encrypted".into())),
            CompressionMethod::STORE => Box::new(local.verifying_reader(data)),
            CompressionMethod::DEFLATE => Box::new(local.verifying_reader(DeflateDecoder::new(data))),
            other => return Err(here(format!("compression method {other:?}"))),
        };
        take(&path, Box::new(Unzipped(content)))?;
    }
    Ok(())
}

/// The content of a file, whose errors are those of the archive.
struct Unzipped<'a>(Content<'a>);

impl Read for Unzipped<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.0.read(into).map_err(|error| Damage::broken(WHAT, error))
    }
}

/// Whether it only says that a file has nothing to replay.
fn is_other(reason: &Reason) -> bool {
    matches!(
        reason,
        Reason::Unrecognised { .. }
            | Reason::Empty
            | Reason::NoEvents
            | Reason::NoHistory
            | Reason::DebugLog
            | Reason::NothingInside(_)
            | Reason::NotASnapshot { .. }
    )
}
