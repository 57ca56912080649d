//! Folders in virtual time: polls are made when they are due.

use super::*;

const MS: u64 = 1_000_000;
const LEASE: Duration = Duration::from_millis(300);

fn folder(path: &Path) -> Folder {
    Folder::new(FolderOptions::new(path)).unwrap()
}

/// As on a shared file system, whose changes the system does not report.
fn unreported(path: &Path) -> Folder {
    let mut folder = folder(path);
    folder.notify.forget_inotify();
    folder
}

fn put(folder: &mut Folder, key: &str) {
    let value = format!("{{\"key\":\"{key}\"}}");
    folder.put(SimTime::ZERO, key, &value, LEASE).unwrap();
}

fn polled(folder: &mut Folder, now_ms: u64) -> Vec<String> {
    let mut changes = Vec::new();
    folder.poll(SimTime(now_ms * MS), &mut changes).unwrap();
    let mut all: Vec<String> = changes
        .into_iter()
        .map(|change| match change {
            Change::Put { key, value } => {
                assert_eq!(value, format!("{{\"key\":\"{key}\"}}"));
                format!("+{key}")
            }
            Change::Deleted { key } => format!("-{key}"),
            Change::Invalid { name, reason } => {
                let name = Path::new(&name).file_name().unwrap().to_str().unwrap();
                format!("!{name}: {reason}")
            }
        })
        .collect();
    all.sort();
    all
}

#[test]
fn entries_come_and_go_whether_the_system_reports_changes_or_not() {
    for make in [folder, unreported] {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("not/yet/there");
        let mut watcher = make(&path);
        assert_eq!(polled(&mut watcher, 0), [""; 0]);
        let (mut a, mut b) = (folder(&path), folder(&path));
        put(&mut a, "a");
        put(&mut b, "b");
        assert_eq!(polled(&mut watcher, 600), ["+a", "+b"]);
        assert_eq!(polled(&mut watcher, 610), [""; 0]);
        a.delete("a").unwrap();
        b.renew(SimTime::ZERO, "b").unwrap();
        assert_eq!(polled(&mut watcher, 1_200), ["-a"]);
        fs::remove_dir_all(&path).unwrap();
        assert_eq!(polled(&mut watcher, 1_800), ["-b"]);
        put(&mut a, "a");
        assert_eq!(polled(&mut watcher, 2_400), ["+a"]);
    }
}

/// Renews `key`, again until its time is a later one: files' times are read from a clock that ticks.
fn renew_later(folder: &mut Folder, key: &str) {
    let path = folder.file(key);
    let before = stat(&path).ok().map(|found| found.modified);
    for _ in 0..1_000_000 {
        folder.renew(SimTime::ZERO, key).unwrap();
        if stat(&path).ok().map(|found| found.modified) != before {
            return;
        }
    }
    panic!("the time of {} stands still", path.display());
}

/// Renews `alive` three times in each lease while `watchers` poll when they are due, for `ms`.
fn live(watchers: &mut [Folder], alive: &[&str], from_ms: u64, ms: u64) -> Vec<Vec<(u64, String)>> {
    let mut seen = vec![Vec::new(); watchers.len()];
    let mut due = vec![SimTime::ZERO; watchers.len()];
    for now in (from_ms..from_ms + ms).step_by(10) {
        if (now - from_ms).is_multiple_of(100) {
            for watcher in &mut *watchers {
                for key in alive {
                    if watcher.own.contains_key(*key) {
                        renew_later(watcher, key);
                    }
                }
            }
        }
        for (at, watcher) in watchers.iter_mut().enumerate() {
            let reports = now >= due[at].0 / MS || !watcher.notify.is_quiet();
            if reports {
                let found = polled(watcher, now);
                seen[at].extend(found.into_iter().map(|change| (now, change)));
                due[at] = watcher.next_look.min(watcher.next_round);
            }
        }
    }
    seen
}

#[test]
fn whoever_is_killed_is_forgotten_by_all_within_two_leases_however_many_they_are() {
    let dir = tempfile::tempdir().unwrap();
    let keys: Vec<String> = (0..12).map(|n| format!("k{n:02}")).collect();
    let mut all: Vec<Folder> = keys.iter().map(|_| folder(dir.path())).collect();
    for (folder, key) in all.iter_mut().zip(&keys) {
        put(folder, key);
    }
    let names: Vec<&str> = keys.iter().map(String::as_str).collect();
    let seen = live(&mut all, &names, 0, 1_500);
    let everyone: Vec<String> = keys.iter().map(|key| format!("+{key}")).collect();
    for seen in &seen {
        let changes: Vec<String> = seen.iter().map(|(_, change)| change.clone()).collect();
        assert_eq!(changes, everyone, "nobody is forgotten while all live");
    }
    // Five side by side are killed, one stands alone.
    let dead = [3, 4, 5, 6, 7, 10];
    let mut left: Vec<Folder> = Vec::new();
    for (at, folder) in all.into_iter().enumerate() {
        if !dead.contains(&at) {
            left.push(folder);
        }
    }
    let alive: Vec<&str> = (0..12)
        .filter(|at| !dead.contains(at))
        .map(|at| names[at])
        .collect();
    let seen = live(&mut left, &alive, 1_500, 1_200);
    for seen in &seen {
        let mut gone: Vec<&str> = seen.iter().map(|(_, change)| change.as_str()).collect();
        gone.sort_unstable();
        assert_eq!(gone, ["-k03", "-k04", "-k05", "-k06", "-k07", "-k10"]);
        let last = seen.iter().map(|(at, _)| *at).max().unwrap();
        assert!((1_800..=2_110).contains(&last), "{seen:?}");
    }
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 6);
}

#[test]
fn an_entry_that_was_removed_is_put_again_by_its_next_renewal() {
    let dir = tempfile::tempdir().unwrap();
    let (mut a, mut watcher) = (folder(dir.path()), folder(dir.path()));
    put(&mut a, "a");
    assert_eq!(polled(&mut watcher, 0), ["+a"]);
    assert_eq!(polled(&mut watcher, 150), [""; 0]);
    assert_eq!(polled(&mut watcher, 301), ["-a"], "its lease is over");
    assert!(!a.file("a").exists());
    a.renew(SimTime::ZERO, "a").unwrap();
    assert_eq!(polled(&mut watcher, 310), ["+a"]);
}

#[test]
fn an_entry_replaced_by_a_fifo_is_written_again_by_its_next_renewal() {
    let dir = tempfile::tempdir().unwrap();
    let (mut owner, mut watcher) = (folder(dir.path()), folder(dir.path()));
    put(&mut owner, "a");
    assert_eq!(polled(&mut watcher, 0), ["+a"]);
    let file = owner.file("a");
    fs::remove_file(&file).unwrap();
    let mode = Mode::from_raw_mode(0o600);
    rustix::fs::mknodat(CWD, &file, rustix::fs::FileType::Fifo, mode, 0).unwrap();
    let refused = polled(&mut watcher, 600);
    assert!(
        refused.contains(&"!a.json: it is not a regular file".to_owned()),
        "{refused:?}"
    );
    owner.renew(SimTime::ZERO, "a").unwrap();
    assert!(polled(&mut watcher, 1_200).contains(&"+a".to_owned()));
}

#[test]
fn a_removed_folder_is_made_again_by_the_next_renewal() {
    let outer = tempfile::tempdir().unwrap();
    let path = outer.path().join("cluster");
    let mut a = folder(&path);
    put(&mut a, "a");
    fs::remove_dir_all(&path).unwrap();
    a.renew(SimTime::ZERO, "a").unwrap();
    assert!(a.file("a").exists());
    assert_eq!(polled(&mut folder(&path), 0), ["+a"]);
}

#[test]
fn a_watcher_that_stood_still_judges_nobody_by_that_time() {
    let dir = tempfile::tempdir().unwrap();
    let (mut a, mut watcher) = (folder(dir.path()), folder(dir.path()));
    put(&mut a, "a");
    assert_eq!(polled(&mut watcher, 0), ["+a"]);
    assert_eq!(polled(&mut watcher, 60_000), [""; 0]);
    assert_eq!(polled(&mut watcher, 60_150), [""; 0]);
    assert_eq!(
        polled(&mut watcher, 60_301),
        ["-a"],
        "it is silent all the same"
    );
}

#[test]
fn invalid_files_are_named_once_and_the_last_valid_entry_stays_for_its_lease() {
    let dir = tempfile::tempdir().unwrap();
    let (mut a, mut watcher) = (folder(dir.path()), folder(dir.path()));
    put(&mut a, "a");
    let whole = fs::read_to_string(a.file("a")).unwrap();
    assert_eq!(polled(&mut watcher, 0), ["+a"]);
    for cut in 0..whole.len() {
        fs::write(a.file("a"), &whole[..cut]).unwrap();
        let found = polled(&mut watcher, 20);
        assert!(
            found
                .iter()
                .all(|change| change.starts_with("!a.json: EOF")),
            "{found:?}"
        );
        assert_eq!(found.len(), usize::from(cut == 0), "named once");
    }
    polled(&mut watcher, 150);
    assert_eq!(polled(&mut watcher, 160), [""; 0], "it stays");
    polled(&mut watcher, 300);
    polled(&mut watcher, 451);
    assert!(!a.file("a").exists());
    let mut fresh = folder(dir.path());
    assert_eq!(polled(&mut fresh, 0), [""; 0]);
}

#[test]
fn only_regular_files_of_ours_are_opened() {
    for make in [folder, unreported] {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        let whole = r#"{"lease_ms":300,"record":{"key":"a"}}"#;
        fs::write(at("notes.txt"), whole).unwrap();
        fs::write(at("a b.json"), whole).unwrap();
        fs::write(at("none.json"), whole.replace("300", "0")).unwrap();
        fs::write(at("long.json"), whole.replace("300", "300000000")).unwrap();
        fs::write(
            at("more.json"),
            whole.replace("\"record\"", "\"x\":1,\"record\""),
        )
        .unwrap();
        fs::write(at("a.json"), whole).unwrap();
        File::create(at("huge.json"))
            .unwrap()
            .set_len(1 << 30)
            .unwrap();
        fs::create_dir(at("folder.json")).unwrap();
        std::os::unix::fs::symlink("/dev/zero", at("zero.json")).unwrap();
        std::os::unix::fs::symlink("a.json", at("link.json")).unwrap();
        let fifo = rustix::fs::FileType::Fifo;
        rustix::fs::mknodat(CWD, at("fifo.json"), fifo, Mode::from_raw_mode(0o600), 0).unwrap();
        let found = polled(&mut make(dir.path()), 0);
        let mut expected = vec!["+a".to_owned()];
        for (name, why) in [
            ("fifo", "it is not a regular file"),
            ("folder", "it is not a regular file"),
            ("huge", "it is not a regular file of at most 262400 bytes"),
            ("link", "it is not a regular file"),
            ("long", "`lease_ms` is 300000000"),
            (
                "more",
                "unknown field `x`, expected `lease_ms` or `record` at line 1 column 19",
            ),
            ("none", "`lease_ms` is 0"),
            ("zero", "it is not a regular file"),
        ] {
            expected.push(format!("!{name}.json: {why}"));
        }
        expected.sort();
        assert_eq!(found, expected);
    }
}

#[test]
fn a_link_where_an_entry_is_written_is_not_followed() {
    let dir = tempfile::tempdir().unwrap();
    let target = dir.path().join("precious");
    fs::write(&target, "precious").unwrap();
    let mut a = folder(dir.path());
    std::os::unix::fs::symlink(&target, a.file("a").with_extension("new")).unwrap();
    std::os::unix::fs::symlink(&target, a.file("a")).unwrap();
    put(&mut a, "a");
    assert_eq!(fs::read_to_string(&target).unwrap(), "precious");
    assert!(a.file("a").symlink_metadata().unwrap().is_file());
}

#[test]
fn a_renewal_changes_no_directory_and_wakes_nobody() {
    let dir = tempfile::tempdir().unwrap();
    let (mut a, mut watcher) = (folder(dir.path()), folder(dir.path()));
    put(&mut a, "a");
    polled(&mut watcher, 0);
    let before = stat(dir.path()).unwrap().modified;
    a.renew(SimTime::ZERO, "a").unwrap();
    assert_eq!(stat(dir.path()).unwrap().modified, before);
    assert!(watcher.notify.is_quiet());
    assert_ne!(
        stat(&a.file("a")).unwrap().modified,
        watcher.entries["a"].modified
    );
}

#[test]
fn a_folder_that_cannot_be_read_keeps_what_is_known() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("peers");
    let (mut a, mut watcher) = (folder(&path), unreported(&path));
    put(&mut a, "a");
    assert_eq!(polled(&mut watcher, 0), ["+a"]);
    let away = dir.path().join("away");
    fs::rename(&path, &away).unwrap();
    std::os::unix::fs::symlink(&path, &path).unwrap(); // a loop: no way in
    let mut changes = Vec::new();
    let error = watcher.poll(SimTime(600 * MS), &mut changes).unwrap_err();
    assert!(
        error.to_string().contains("check that every process"),
        "{error}"
    );
    assert_eq!(changes, []);
    fs::remove_file(&path).unwrap();
    fs::rename(&away, &path).unwrap();
    assert_eq!(polled(&mut watcher, 1_200), [""; 0]);
}
