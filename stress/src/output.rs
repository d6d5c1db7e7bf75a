//! Files that commands write.

use std::io::{self, Write};
use std::path::Path;

use aquifer_allocator::replace_file::{check_destination, replace_file};

use crate::cli::Command;
use crate::exit::Failure;

/// Replaces a file by one with this text. After an error the file is as it was.
///
/// # Errors
/// Those of the system.
pub fn write(path: &Path, text: &str) -> Result<(), Failure> {
    replace_file(
        path,
        |_, cause| failed(path, cause),
        |file| file.write_all(text.as_bytes()).map_err(|cause| failed(path, cause)),
    )
}

/// Checks that the file which a command writes can be created, before the work for it.
///
/// # Errors
/// Those of the system.
pub fn check(command: &Command) -> Result<(), Failure> {
    let path = match command {
        Command::Report(args) => Some(&args.output),
        Command::Demo(args) => args.report.as_ref(),
        Command::Run(args) => args.report.as_ref().or(args.snapshot.as_ref()),
        Command::Replay(args) => args.snapshot.as_ref(),
        Command::Oom(args) => args.snapshot.as_ref(),
        Command::Compare(args) => args.plot.as_ref(),
        _ => None,
    };
    path.map_or(Ok(()), |path| check_destination(path).map_err(|cause| failed(path, cause)))
}

fn failed(path: &Path, cause: io::Error) -> Failure {
    Failure::File { path: path.to_owned(), cause }
}
