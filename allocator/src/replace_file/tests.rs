//! Files that are replaced, and errors that leave nothing behind.

use std::io::Write;

use super::*;

/// A directory that is removed in the end.
struct Directory(PathBuf);

impl Directory {
    fn new(name: &str) -> Directory {
        let path = std::env::temp_dir().join(format!("aquifer-replace-{}-{name}", std::process::id()));
        fs::create_dir(&path).unwrap();
        Directory(path)
    }

    fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(&self.0).unwrap();
        let mut names: Vec<String> =
            entries.map(|entry| entry.unwrap().file_name().to_str().unwrap().to_owned()).collect();
        names.sort_unstable();
        names
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn replace(path: &Path, text: &str) -> Result<(), (Step, io::Error)> {
    let failed = |step, error| (step, error);
    replace_file(path, failed, |file| file.write_all(text.as_bytes()).map_err(|error| failed(Step::Write, error)))
}

#[test]
fn what_fails_half_way_leaves_the_file_that_was_there() {
    let directory = Directory::new("full");
    let path = directory.0.join("page");
    for before in [None, Some("before")] {
        if let Some(before) = before {
            replace(&path, before).unwrap();
        }
        let error = replace_file(
            &path,
            |_, error| error,
            |file| {
                file.write_all(b"half of it")?;
                Err(ErrorKind::StorageFull.into())
            },
        );
        assert_eq!(error.unwrap_err().kind(), ErrorKind::StorageFull);
        assert_eq!(fs::read_to_string(&path).ok().as_deref(), before);
        assert_eq!(directory.names().len(), usize::from(before.is_some()));
    }
}

#[test]
fn temporary_files_of_others_are_left_alone() {
    let directory = Directory::new("others");
    let path = directory.0.join("page");
    let (first, _) = create_beside(&path).unwrap();
    let number: u64 = first.file_stem().unwrap().to_str().unwrap().rsplit('-').next().unwrap().parse().unwrap();
    let others = (number + 1..number + 20).map(|number| format!(".page.aquifer-{}-{number}.tmp", std::process::id()));
    others.for_each(|name| fs::write(directory.0.join(name), "of another").unwrap());
    replace(&path, "text").unwrap();
    assert_eq!(directory.names().len(), 21);
}

#[test]
fn places_where_no_file_can_be_are_known_before_writing() {
    let directory = Directory::new("places");
    for (place, step) in [
        ("", Step::Rename),
        ("missing/page", Step::Create),
        ("/", Step::Rename),
        (".", Step::Rename),
        ("new/", Step::Rename),
        ("file/page", Step::Create),
    ] {
        let place = if place.is_empty() { PathBuf::new() } else { directory.0.join(place) };
        fs::write(directory.0.join("file"), "").unwrap();
        check_destination(&place).unwrap_err();
        assert_eq!(replace(&place, "text").unwrap_err().0, step, "{place:?}");
    }
    check_destination(&directory.0.join("page")).unwrap();
    check_destination(&directory.0.join("file")).unwrap();
    assert_eq!(directory.names(), ["file"]);
}

#[test]
#[cfg(unix)]
fn permissions_and_links_stay() {
    use std::os::unix::fs::{PermissionsExt, symlink};
    let directory = Directory::new("kept");
    let (file, link) = (directory.0.join("file"), directory.0.join("link"));
    fs::write(&file, "before").unwrap();
    fs::set_permissions(&file, fs::Permissions::from_mode(0o640)).unwrap();
    symlink("file", &link).unwrap();
    check_destination(&link).unwrap();
    replace(&link, "after").unwrap();
    assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
    assert_eq!(fs::read_to_string(&file).unwrap(), "after");
    assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o640);
    assert_eq!(directory.names(), ["file", "link"]);
}

#[test]
#[cfg(target_os = "linux")]
fn devices_are_written_and_stay() {
    use std::os::unix::fs::FileTypeExt;
    check_destination("/dev/full".as_ref()).unwrap();
    let (step, error) = replace("/dev/full".as_ref(), "text").unwrap_err();
    assert_eq!((step, error.kind()), (Step::Write, ErrorKind::StorageFull));
    replace("/dev/null".as_ref(), "text").unwrap();
    assert!(fs::metadata("/dev/null").unwrap().file_type().is_char_device());
}
