//! Regular files, which threads read at any place.

use std::fs::File;
use std::io;
use std::path::Path;

/// Opens a regular file to read it, and returns its length.
///
/// # Errors
/// Errors of the system; a directory, a pipe, or another file that is not regular.
pub fn open(path: &Path) -> io::Result<(File, u64)> {
    let mut options = File::options();
    options.read(true);
    // Without it, opening a pipe would wait for a writer. It has no effect on regular files.
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::custom_flags(&mut options, libc::O_NONBLOCK);
    let file = options.open(path)?;
    let metadata = file.metadata()?;
    if metadata.is_dir() {
        return Err(io::ErrorKind::IsADirectory.into());
    }
    if !metadata.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "this is not a file of a fixed length"));
    }
    Ok((file, metadata.len()))
}

/// Reads all of `into` at `offset`.
#[cfg(unix)]
pub(crate) fn read_at(file: &File, into: &mut [u8], offset: u64) -> io::Result<()> {
    std::os::unix::fs::FileExt::read_exact_at(file, into, offset)
}

/// Reads all of `into` at `offset`.
#[cfg(windows)]
pub(crate) fn read_at(file: &File, mut into: &mut [u8], mut offset: u64) -> io::Result<()> {
    while !into.is_empty() {
        match std::os::windows::fs::FileExt::seek_read(file, into, offset)? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            read => (into, offset) = (&mut into[read..], offset + read as u64),
        }
    }
    Ok(())
}

#[cfg(all(test, unix))]
mod tests {
    #[test]
    fn only_regular_files_are_opened_and_pipes_do_not_block() {
        let directory = std::env::temp_dir().join(format!("aquifer-regular-file-{}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        let (pipe, file) = (directory.join("pipe"), directory.join("file"));
        assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        std::fs::write(&file, [1; 7]).unwrap();
        let kind = |path| super::open(path).unwrap_err().kind();
        assert_eq!(kind(&pipe), std::io::ErrorKind::InvalidInput);
        assert_eq!(kind(&directory), std::io::ErrorKind::IsADirectory);
        assert_eq!(super::open(&file).unwrap().1, 7);
        std::fs::remove_dir_all(&directory).unwrap();
    }
}
