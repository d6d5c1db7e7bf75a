//! Files that are replaced as a whole, or not at all.

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

/// Where replacing a file failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// No file could be created in its directory.
    Create,
    /// Its data could not be written.
    Write,
    /// The complete file could not get its name.
    Rename,
}

/// Replaces the file at `path` by one with the data that `write` gives it. After an error, of the
/// system or of `write`, the file is as it was, and nothing else is left.
///
/// The data goes to a temporary file in the same directory, which is renamed when it is complete.
/// It has the permissions of the file that it replaces. If `path` is a symbolic link, its target is
/// replaced, and the link stays. A pipe, a device or another file that is not regular is written
/// directly.
///
/// # Errors
/// Those of the system, which `failed` converts, and of `write`.
pub fn replace_file<E>(
    path: &Path,
    failed: impl Fn(Step, io::Error) -> E,
    write: impl FnOnce(&mut File) -> Result<(), E>,
) -> Result<(), E> {
    let at = |step| move |error| (step, error);
    let fail = |(step, error)| failed(step, error);
    let Destination::File(place) = Destination::of(path).map_err(fail)? else {
        let mut file = OpenOptions::new().write(true).open(path).map_err(at(Step::Write)).map_err(fail)?;
        return write(&mut file);
    };
    let (temporary, mut file) = create_beside(&place).map_err(at(Step::Create)).map_err(fail)?;
    let written = match fs::metadata(&place) {
        // Before it has contents, which not all users may be allowed to read.
        Ok(replaced) => file.set_permissions(replaced.permissions()).map_err(at(Step::Create)).map_err(fail),
        Err(_) => Ok(()),
    };
    let written = written.and_then(|()| write(&mut file));
    // Network file systems report only then that the disk is full.
    let written = written.and_then(|()| file.sync_all().map_err(at(Step::Write)).map_err(fail));
    // Before the rename, which some systems do not allow for an open file.
    drop(file);
    written.and_then(|()| fs::rename(&temporary, &place).map_err(at(Step::Rename)).map_err(fail)).inspect_err(|_| {
        // The first error is the one to report.
        let _ = fs::remove_file(&temporary);
    })
}

/// Whether [`replace_file`] can create a file for this path, before the work whose result goes
/// there.
///
/// # Errors
/// Those of the system, and a path that names a directory.
pub fn check_destination(path: &Path) -> io::Result<()> {
    match Destination::of(path).map_err(|(_, error)| error)? {
        Destination::File(place) => create_beside(&place).and_then(|(temporary, _)| fs::remove_file(temporary)),
        Destination::Stream => Ok(()),
    }
}

/// The file at a path.
#[derive(Debug, PartialEq, Eq)]
enum Destination {
    /// A regular file at this place, reached through no link, or nothing yet.
    File(PathBuf),
    /// A pipe or a device, which must not be replaced.
    Stream,
}

/// Links that are followed one after the other, as many as Linux follows.
const LINKS_MAX: usize = 40;

impl Destination {
    fn of(path: &Path) -> Result<Destination, (Step, io::Error)> {
        match fs::metadata(path) {
            Ok(metadata) if metadata.is_dir() => return Err((Step::Rename, ErrorKind::IsADirectory.into())),
            Ok(metadata) if !metadata.is_file() => return Ok(Destination::Stream),
            Ok(_) => {}
            // Or a link to a missing file.
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err((Step::Create, error)),
        }
        let mut place = path.to_owned();
        for _ in 0..LINKS_MAX {
            let Ok(to) = fs::read_link(&place) else { break };
            // Relative to the directory of the link, unless it begins at the root.
            place = place.parent().unwrap_or(Path::new("")).join(to);
        }
        let ends_in_separator = place.as_os_str().as_encoded_bytes().last().is_some_and(|&byte| byte == b'/');
        if place.file_name().is_none() || ends_in_separator {
            return Err((Step::Rename, io::Error::new(ErrorKind::InvalidInput, "the path names no file")));
        }
        Ok(Destination::File(place))
    }
}

/// Bytes of a file's name that the name of its temporary file has. File systems take names of 255.
const NAME_BYTES: usize = 200;

/// Creates a new file in the directory of `place`.
fn create_beside(place: &Path) -> io::Result<(PathBuf, File)> {
    static CREATED: AtomicU64 = AtomicU64::new(0);
    let name = place.file_name().unwrap_or_default().to_string_lossy();
    let end = (0..=NAME_BYTES.min(name.len())).rev().find(|&end| name.is_char_boundary(end)).unwrap_or(0);
    loop {
        let (process, number) = (std::process::id(), CREATED.fetch_add(1, Ordering::Relaxed));
        let temporary = place.with_file_name(format!(".{}.aquifer-{process}-{number}.tmp", &name[..end]));
        match OpenOptions::new().write(true).create_new(true).open(&temporary) {
            // From an earlier process with the same number, or from one on another machine.
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
            created => return created.map(|file| (temporary, file)),
        }
    }
}

#[cfg(test)]
mod tests;
