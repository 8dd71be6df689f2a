BEGIN TRANSACTION;
CREATE TABLE containers (
    id TEXT PRIMARY KEY, sandbox_id TEXT NOT NULL, kind TEXT NOT NULL, state TEXT NOT NULL,
    cpus TEXT, mems TEXT NOT NULL, quota_us INTEGER, period_us INTEGER, shares INTEGER,
    cgroups_path TEXT NOT NULL, name TEXT NOT NULL, pod_name TEXT NOT NULL,
    pod_namespace TEXT NOT NULL, pod_uid TEXT NOT NULL, handler TEXT NOT NULL,
    bundle TEXT NOT NULL, source TEXT NOT NULL, recorded_ns INTEGER NOT NULL,
    pid_hint INTEGER NOT NULL, note TEXT NOT NULL, first_ns INTEGER NOT NULL);
INSERT INTO "containers" VALUES('c1','p1','container','running','4-5','',200000,100000,2048,'/kubepods/podp1/c1','c1','pod-p1','shop','uid-p1','','/run/containerd/k8s.io/c1','hook:poststart',1000,0,'',1000);
INSERT INTO "containers" VALUES('c2','p2','container','running','8','',NULL,NULL,102,'/kubepods/podp2/c2','c2','pod-p2','shop','uid-p2','','/run/containerd/k8s.io/c2','hook:poststart',1000,0,'',1000);
CREATE TABLE first_seen (
    sandbox_id TEXT NOT NULL, role TEXT NOT NULL, cpus TEXT NOT NULL,
    PRIMARY KEY (sandbox_id, role)) WITHOUT ROWID;
INSERT INTO "first_seen" VALUES('p1','emulator','1');
INSERT INTO "first_seen" VALUES('p1','iothread','0-15');
INSERT INTO "first_seen" VALUES('p1','vcpu','2-3');
CREATE TABLE guest_cpusets (
    sandbox_id TEXT NOT NULL, container_id TEXT NOT NULL, cpus TEXT NOT NULL,
    PRIMARY KEY (sandbox_id, container_id)) WITHOUT ROWID;
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
INSERT INTO "meta" VALUES('boot_id',:boot);
INSERT INTO "meta" VALUES('version','1');
CREATE TABLE pairs (
    sandbox_id TEXT NOT NULL, tgid INTEGER NOT NULL, tid INTEGER NOT NULL,
    starttime INTEGER NOT NULL, cpu INTEGER NOT NULL,
    PRIMARY KEY (tgid, tid, starttime)) WITHOUT ROWID;
INSERT INTO "pairs" VALUES('p1',1002,1003,100,5);
INSERT INTO "pairs" VALUES('p1',1002,1004,100,4);
CREATE TABLE released (sandbox_id TEXT PRIMARY KEY) WITHOUT ROWID;
INSERT INTO "released" VALUES('p2');
CREATE TABLE seen (
    container_id TEXT PRIMARY KEY, stamp_ns INTEGER NOT NULL, pid INTEGER NOT NULL);
INSERT INTO "seen" VALUES('c1',1000,7);
INSERT INTO "seen" VALUES('c2',1001,8);
CREATE TABLE told (container_id TEXT NOT NULL, source TEXT NOT NULL, cpus TEXT, recorded_ns INTEGER NOT NULL, PRIMARY KEY (container_id, source)) WITHOUT ROWID;
INSERT INTO "told" VALUES('c1','bundle','4-5',1000);
INSERT INTO "told" VALUES('c2','bundle','8',1000);
CREATE INDEX containers_sandbox ON containers (sandbox_id);
CREATE INDEX seen_stamp ON seen (stamp_ns);
CREATE INDEX pairs_sandbox ON pairs (sandbox_id);
COMMIT;
